"""`facet doctor` and `facet collect-env`: what helps a server here, what is missing, what that costs.

Nothing here imports torch, or starts a program but `nvidia-smi` and `ldconfig`: the answer comes at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from server.http.connection.connection_limits import why_too_few_descriptors
from server.terminal.console import parser_of
from worker.host import machine, nvidia
from worker.host.private_folder import make_private
from worker.kernels.cpu.library import levels_here, where_built

_GIB = 1 << 30
_LITTLE_MEMORY, _LITTLE_DISK = 2 * _GIB, 5 * _GIB
_SECONDS = 10.0
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn", "zmq", "httptools")
_REPORTED = (
    *(
        "facet-serve",
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface-hub",
        "numpy",
        "pillow",
    ),
    *("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pyzmq", "msgspec", "pydantic", "jinja2"),
    *("llguidance", "ray", "triton"),
)
_MARKS = {"good": "ok", "note": "ok", "slow": "slow", "broken": "BROKEN"}


class Finding(NamedTuple):
    """The result of one check; `cost` says what it costs, and what to do."""

    grade: Literal["good", "note", "slow", "broken"]
    text: str
    cost: str = ""


def run(arguments: Sequence[str], command: str) -> int:
    """Prints what was found. The exit code is 1 if something keeps every server from starting here."""
    parser = parser_of(
        command, "Check this machine: what it has for serving models, what is missing, and what that costs."
    )
    parser.add_argument("--report", action="store_true", help="Print a text for a bug report, with versions.")
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    given = parser.parse_args(arguments)
    findings = examine()
    if given.json:
        print(json.dumps([{"name": name, **one._asdict()} for name, one in findings.items()], indent=2))
    elif given.report or command.endswith("collect-env"):
        print(report(findings))
    else:
        print("\n".join(_lines(findings)))
        print(_verdict(findings))
    return 1 if any(one.grade == "broken" for one in findings.values()) else 0


def report(findings: Mapping[str, Finding]) -> str:
    """Versions and findings as text that names neither user nor host."""
    home = os.path.expanduser("~")
    lines = [
        f"system: {platform.system()} {platform.release()} {platform.machine()}",
        f"libc: {' '.join(platform.libc_ver())}",
        f"python: {platform.python_implementation()} {platform.python_version()}",
        *(f"{name}: {_version_of(name)}" for name in _REPORTED),
        *_lines(findings),
    ]
    text = "\n".join(lines)
    return text.replace(home, "~") if len(home) > 1 else text


def _lines(findings: Mapping[str, Finding]) -> list[str]:
    return [
        f"{_MARKS[one.grade]:6} {name}: {one.text}" + (f"\n       {one.cost}" if one.cost else "")
        for name, one in findings.items()
    ]


def _verdict(findings: Mapping[str, Finding]) -> str:
    broken = [name for name, one in findings.items() if one.grade == "broken"]
    slow = [name for name, one in findings.items() if one.grade == "slow"]
    if broken:
        return f"No model can be served here until this is fixed: {', '.join(broken)}."
    if slow:
        return f"Models can be served here, but slower than necessary because of: {', '.join(slow)}."
    return "Models can be served here; `facet prove` checks that they are computed right."


def examine(root: Path = Path("/")) -> dict[str, Finding]:
    """All findings by their names. `root` is where /proc and /sys lie."""
    from huggingface_hub import constants  # it reads HF_HOME and its kin as downloads do

    found = {
        "packages": _packages(),
        "processor": processor(root),
        "cores": cores(root),
        "kernels": _kernels(),
        "memory": memory(root),
        "huge pages": huge_pages(root),
        "CUDA": cuda(root, nvidia.cuda_of_torch(), _cards()),
    }
    if nvidia.cards_here(root):
        compiler = shutil.which("gcc") or shutil.which("clang")
        headers = Path(sysconfig.get_paths()["include"])
        found["Triton"] = triton(compiler, headers, printed_by("/sbin/ldconfig", "-p"))
    reason = why_too_few_descriptors()
    found["file descriptors"] = Finding("broken", "too few", reason) if reason else Finding("good", "enough")
    found["cache folder"] = caches(machine.cache_folder())
    found["models"] = checkpoints(Path(constants.HF_HUB_CACHE))
    return found


def _packages() -> Finding:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        remedy = "nothing can be served: install Facet, `pip install .` in its folder"
        return Finding("broken", f"missing: {', '.join(missing)}", remedy)
    return Finding("good", f"facet-serve {_version_of('facet-serve')}, torch {_version_of('torch')}")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def processor(root: Path) -> Finding:
    cpuinfo = root / "proc/cpuinfo"
    levels = levels_here(cpuinfo)
    name = processor_name(cpuinfo)
    if not levels:
        return Finding(
            "slow",
            name,
            "it has neither AVX2 nor NEON: torch computes, slower, above all with quantized weights",
        )
    text = f"{name}: kernels for {levels[0].name}"
    match levels[0].name:
        case "amx":
            return Finding("good", text)
        case "avx512bf16" | "avx512":
            return Finding("note", text, "prompts would be processed faster on a processor with AMX")
        case "neon":
            return Finding("note", text, "tested in an emulator only, never measured on such a processor")
        case _:
            return Finding("note", text, "a processor with AVX-512 or AMX would be faster")


def processor_name(cpuinfo: Path) -> str:
    """The processor's name, or its kind where the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or os.uname().machine


def cores(root: Path) -> Finding:
    usable = machine.usable_cores(root)
    text = f"{usable} physical cores usable, of {os.cpu_count() or 1} hardware threads"
    if usable > 1:
        return Finding("good", text)
    return Finding("slow", text, "the HTTP process and the engine share one core; allow the container more")


def _kernels() -> Finding:
    levels = levels_here()
    if not levels:
        return Finding("note", "none for this processor")
    if (path := where_built(levels[0], machine.cache_folder())) is not None:
        return Finding("good", f"compiled: {path}")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is not None:
        return Finding(
            "note",
            f"not compiled yet; {compiler} is there",
            "the first start takes longer: 20 to 30 seconds on an idle machine, two minutes on a busy one",
        )
    cost = "torch computes, slower, and no quantization: install gcc, or a wheel that carries the kernels"
    return Finding("slow", "not compiled, and there is no C compiler (cc)", cost)


def memory(root: Path) -> Finding:
    free, total = machine.available_memory(root), machine.total_memory(root)
    text = f"{free / _GIB:.1f} GiB available of {total / _GIB:.1f} GiB, limits of containers included"
    if (limit := machine.address_limit()) is not None:
        text += f", addresses limited to {limit / _GIB:.1f} GiB (ulimit -v)"
    if free < _LITTLE_MEMORY:
        return Finding("slow", text, "models of more than 0.5 billion weights will hardly fit")
    return Finding("good", text)


def huge_pages(root: Path) -> Finding:
    try:
        words = (root / _HUGE_PAGES).read_text().split()
    except OSError:
        words = []
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    if chosen in ("always", "madvise"):
        return Finding("good", chosen)
    cost = f"weights are read up to 1.5 times as fast with huge pages: as root, echo madvise > /{_HUGE_PAGES}"
    return Finding("slow", chosen, cost)


def cuda(root: Path, build: str | None, cards: str) -> Finding:
    """Whether torch, built for this version of CUDA or for none, can use what nvidia-smi calls `cards`."""
    reason = nvidia.why_unusable(build, root) or ""
    if cards:
        return Finding("slow" if reason else "good", cards, reason)
    if nvidia.cards_here(root):
        return Finding("slow", "a device without nvidia-smi", reason or "the driver is not complete")
    return Finding("note", "no device; models run on the processor", reason)


def _cards() -> str:
    """Names, memory and driver of the GPUs, one after the other; empty if there are none."""
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return "; ".join(printed_by("nvidia-smi", *query).strip().splitlines())


def triton(compiler: str | None, headers: Path, libraries: str) -> Finding:
    """What Triton needs to start kernels on a card. `libraries` is what `ldconfig -p` lists."""
    wanted = {
        "a C compiler (gcc)": compiler is not None,
        "Python's headers (python3-dev)": (headers / "Python.h").is_file(),
        "libcuda.so.1 in the list of ldconfig -p (run ldconfig as root)": "libcuda.so.1" in libraries,
    }
    missing = [name for name, is_there in wanted.items() if not is_there]
    if missing:
        return Finding("slow", f"without {', '.join(missing)}", "no kernel can be started on the card")
    return Finding("good", "a C compiler, Python's headers and libcuda.so.1 are there")


def printed_by(name: str, *arguments: str) -> str:
    """The output of a program; "" if it is not there, or fails."""
    program = shutil.which(name)
    if program is None:
        return ""
    try:
        command = [program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def caches(folder: Path) -> Finding:
    """Whether the folder for compiled kernels and tokenizers can be used."""
    try:
        make_private(folder)
    except OSError as error:
        cost = (
            "kernels are compiled at every start, and tokenizers converted: set XDG_CACHE_HOME to a folder "
            "of this user's"
        )
        return Finding("slow", f"{folder}: {error.strerror or error}", cost)
    return Finding("good", str(folder))


def checkpoints(folder: Path) -> Finding:
    """Whether models of the hub can be downloaded to this folder."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{folder}: {free / _GIB:.0f} GiB free"
    if not os.access(there, os.W_OK):
        return Finding("slow", text, "it cannot be written: no model can be downloaded; set HF_HOME")
    if free < _LITTLE_DISK:
        return Finding("slow", text, "larger models cannot be downloaded: set HF_HOME")
    return Finding("good", text)
