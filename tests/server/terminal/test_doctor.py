"""`facet doctor`: what it says of machines that are described by files, and of this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from server.run.commands import TERMINAL, run
from server.terminal import doctor as findings
from server.terminal.doctor import Finding, report


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("flags", "grade", "part"),
    [
        ("sse2", "slow", "torch computes"),
        ("avx2 fma f16c bmi2", "note", "AVX-512"),
        ("avx512f avx512bw avx512vl avx512dq fma bmi2", "note", "AMX"),
    ],
)
def test_processors(
    tmp_path: Path, flags: str, grade: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    root = machine(tmp_path, {"proc/cpuinfo": f"model name\t: A Chip\nflags\t\t: {flags}\n"})
    found = findings.processor(root)
    assert (found.grade, part in found.cost, "A Chip" in found.text) == (grade, True, True)


@pytest.mark.parametrize(
    ("text", "grade"), [("always [madvise] never\n", "good"), ("always madvise [never]\n", "slow")]
)
def test_huge_pages(tmp_path: Path, text: str, grade: str) -> None:
    root = machine(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert findings.huge_pages(root).grade == grade


def test_a_system_without_huge_pages(tmp_path: Path) -> None:
    assert findings.huge_pages(tmp_path).text == "unknown"


def test_memory_counts_the_limits_of_containers(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n",
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/memory.max": str(1 << 30),
            "sys/fs/cgroup/box/memory.current": str(1 << 29),
        },
    )
    found = findings.memory(root)
    assert (found.grade, "0.5 GiB available of 1.0 GiB" in found.text) == ("slow", True)


@pytest.mark.parametrize(
    ("build", "cards", "devices", "grade", "part"),
    [
        ("13.0", "NVIDIA H200, 143771 MiB, 550.54.14", 1, "slow", "needs 580 or newer"),
        (None, "NVIDIA H200, 143771 MiB, 550.54.14", 1, "slow", "built for CPUs"),
        ("12.6", "", 1, "slow", "libcuda.so.1"),
        ("12.6", "", 0, "note", "--gpus all"),
    ],
)
def test_a_card_that_torch_cannot_use(
    tmp_path: Path, build: str | None, cards: str, devices: int, grade: str, part: str
) -> None:
    files = {f"dev/nvidia{number}": "" for number in range(devices)}
    root = machine(tmp_path, files | {"proc/driver/nvidia/version": "Kernel Module  550.54.14  Thu\n"})
    found = findings.cuda(root, build, cards)
    assert (found.grade, part in found.cost) == (grade, True)


def test_what_triton_needs_is_looked_for(tmp_path: Path) -> None:
    listed = "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1\n"
    found = findings.triton(None, tmp_path, "")
    assert found.grade == "slow"
    assert all(part in found.text for part in ("C compiler", "Python's headers", "ldconfig -p"))
    (tmp_path / "Python.h").touch()
    assert findings.triton("/usr/bin/gcc", tmp_path, listed).grade == "good"


def test_a_cache_folder_that_cannot_be_made_costs_something(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert findings.caches(tmp_path / "file" / "facet").grade == "slow"
    assert findings.caches(tmp_path / "facet").grade == "good"


def test_a_machine_where_nothing_can_be_served_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("facet", ["doctor"]) == 0
    assert "Models can be served here" in capsys.readouterr().out
    monkeypatch.setattr(findings, "why_too_few_descriptors", lambda: "raise it")
    assert run("facet", ["doctor", "--json"]) == 1
    grades = {one["name"]: one["grade"] for one in json.loads(capsys.readouterr().out)}
    assert grades["file descriptors"] == "broken"


def test_a_report_has_versions_and_no_name_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: "/home/someone")
    text = report({"cache folder": Finding("good", "/home/someone/.cache/facet")})
    assert "cache folder: ~/.cache/facet" in text
    assert "\ntorch: 2." in text


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", sorted(TERMINAL))
def test_commands_import_no_torch(name: str) -> None:
    program = (
        "import sys; from server.run.commands import run\n"
        "try: run('facet', [sys.argv[1], '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program, name], check=True, timeout=60, capture_output=True)


def test_a_server_starts_without_the_commands() -> None:
    program = "import sys, server.run.commands; sys.exit('server.terminal.console' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
