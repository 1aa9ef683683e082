"""What the comparison writes and counts; what it measures needs a quiet machine, and no test."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MACHINE = {
    "processor": "A CPU",
    "cores": 2,
    "instructions": ["avx2"],
    "memory_gib": 24,
    "read_gb_s": 40.0,
    "bf16_tflop_s": 1.0,
    "fp32_tflop_s": 0.5,
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def load(name: str) -> ModuleType:
        return import_module(name)

    return load


def record(side: str, round: int, tokens: float, **more: object) -> dict[str, Any]:
    case = "256 in, 64 out, 1 at once"
    where = {
        "part": "generation",
        "model": "llama-135m, bfloat16",
        "case": case,
        "side": side,
        "round": round,
    }
    return {
        **where,
        "concurrency": 1,
        "failed": 0,
        "output_tokens_per_second": tokens,
        "tpot_ms": 20.0,
        **more,
    }


def known(*records: dict[str, Any]) -> dict[str, Any]:
    versions = {"facet": "1", "vllm": "2"}
    weights = {"llama-135m": 400_000_000}
    return {
        "records": [*records],
        "machine": MACHINE,
        "date": "today",
        "versions": versions,
        "weights": weights,
    }


RECORDS = [
    *(record("facet", 0, 60), record("facet", 1, 90), record("facet", 2, 70)),
    *(record("vLLM", 0, 30), record("vLLM", 1, 30), record("vLLM", 2, 20, failed=2)),
]


def test_ratios_are_taken_within_a_round(load) -> None:
    ratios = load("page")._ratios(RECORDS, "vLLM", "output_tokens_per_second")
    assert ratios == [2.0, 3.0, 3.5]


def test_only_what_stands_between_the_marks_is_written_anew(load, tmp_path: Path) -> None:
    page = load("page")
    target = tmp_path / "performance.md"
    target.write_text(f"# Before\n\n{page.BEGIN}\nold\n{page.END}\n\n## After\n")
    for _ in range(2):
        page.write(target, known(*RECORDS))
    text = target.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("\n\n## After\n")
    assert (text.count(page.BEGIN), text.count(page.END), text.count("old")) == (1, 1, 0)
    assert "| 30<br>**3.00** (2.00 to 3.50) |" in text
    assert "| llama-135m | 10.0 | facet 2.00, vLLM 2.00 |" in text, "20 ms a token, 10 to read the weights"
    assert "vLLM, 256 in, 64 out, 1 at once, round 3: 2 requests failed." in text
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert len(pictures) == 2
    assert all(name in text for name in pictures)


def test_a_side_that_did_not_start_is_told(load, tmp_path: Path) -> None:
    page = load("page")
    where = {
        "part": "generation",
        "model": "llama-135m, bfloat16",
        "case": "start",
        "side": "vLLM",
        "round": 0,
    }
    failure = {**where, "failure": "it ended with 1:\nno memory"}
    page.write(tmp_path / "p.md", known(record("facet", 0, 60), failure))
    text = (tmp_path / "p.md").read_text()
    assert "vLLM did not start: it ended with 1:\n    no memory" in text
    assert "| facet | 60 |" in text


def test_the_log_of_a_side_is_told_without_folders(load, tmp_path: Path) -> None:
    peers = load("peers")
    code = "import sys; sys.exit('no room in /some/where/else for ' + sys.argv[1])"
    folder = tmp_path / "model"
    server = peers.Server(peers.Side("broken", (sys.executable, "-c", code)), folder)
    with pytest.raises(peers.DidNotStart) as told:
        server.wait_ready()
    server.close()
    assert str(told.value) == "it ended with 1:\nno room in …/else for …/model"


def test_a_tree_holds_children_of_children(load) -> None:
    processes = load("processes")
    inner = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", outer], **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert {process.pid, grandchild} <= set(processes.tree(os.getpid()))
        assert processes.tree(grandchild) == [grandchild]
        assert processes.resident_mib(grandchild) > 1
        process.stdin.close()
    assert processes.resident_mib(grandchild) == 0


def test_time_on_the_processor_is_counted(load) -> None:
    processes = load("processes")
    before = processes.cpu_seconds(os.getpid())
    while processes.cpu_seconds(os.getpid()) == before:
        pass
    assert processes.cpu_seconds(os.getpid()) - before < 1


@pytest.mark.parametrize("quick", [True, False])
def test_every_case_is_a_load_that_can_be_asked_for(load, quick: bool) -> None:
    work = load("work")
    for part, cases in work.CASES.items():
        for case in cases(quick):
            options = case.options("http://h", 1, quick=quick)
            assert options.max_concurrency == (case.concurrency,)
            assert options.num_prompts is not None or options.duration is not None
            assert (options.kind == "embeddings") == (part == "embeddings")
