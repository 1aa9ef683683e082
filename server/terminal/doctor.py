"""`facet doctor` and `facet collect-env`: what helps a server here, what is missing, what that costs.

Nothing here imports torch, or starts a program but `nvidia-smi` and `ldconfig`: the answer comes at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from server.http.connection.limits import why_too_few_descriptors
from server.terminal.server_flags import parser_of
from worker.host import machine, nvidia
from worker.host.private_folder import make_private
from worker.kernels.cpu.library import levels_here, where_built

Grade = Literal["good", "note", "slow", "broken"]

_GIB = 1 << 30
_LITTLE_MEMORY, _LITTLE_DISK = 2 * _GIB, 5 * _GIB
_SECONDS = 10.0
_HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `cost` says what it costs, and what to do."""

    name: str
    grade: Grade
    text: str
    cost: str = ""


def examine(root: Path = Path("/")) -> Iterator[Finding]:
    """All findings. `root` is where /proc and /sys lie."""
    yield _packages()
    yield processor(root)
    yield cores(root)
    yield _kernels()
    yield memory(root)
    yield huge_pages(root)
    yield from _cuda_here(root)
    yield _descriptors()
    yield caches(machine.cache_folder())
    yield checkpoints(_hub_cache())


def _packages() -> Finding:
    names = ("torch", "transformers", "tokenizers", "safetensors", "fastapi", "uvicorn", "zmq", "httptools")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "packages",
            "broken",
            f"missing: {', '.join(missing)}",
            "nothing can be served: install facet-serve",
        )
    return Finding(
        "packages", "good", f"facet-serve {version_of('facet-serve')}, torch {version_of('torch')}"
    )


def processor(root: Path) -> Finding:
    cpuinfo = root / "proc/cpuinfo"
    levels = levels_here(cpuinfo)
    name = model_name(cpuinfo)
    if not levels:
        return Finding(
            "processor", "slow", name, "it has no AVX2: torch computes, and no quantization is possible"
        )
    text = f"{name}: kernels for {levels[0].name}"
    match levels[0].name:
        case "amx":
            return Finding("processor", "good", text)
        case "avx512bf16" | "avx512":
            return Finding("processor", "note", text, "prompts are read faster on a processor with AMX")
        case _:
            return Finding(
                "processor",
                "note",
                text,
                "AVX-512 and AMX compute more in a step; so would a later processor",
            )


def cores(root: Path) -> Finding:
    usable = machine.usable_cores(root)
    threads = os.cpu_count() or 1
    text = f"{usable} physical cores usable, of {threads} hardware threads"
    if usable == 1:
        return Finding(
            "cores", "slow", text, "the HTTP process and the engine share one core; allow the container more"
        )
    return Finding("cores", "good", text)


def _kernels() -> Finding:
    levels = levels_here()
    if not levels:
        return Finding("kernels", "note", "none for this processor")
    if (path := where_built(levels[0], machine.cache_folder())) is not None:
        return Finding("kernels", "good", f"compiled: {path}")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is not None:
        return Finding(
            "kernels", "note", f"not compiled yet; {compiler} is there", "the first start takes 3 s longer"
        )
    return Finding(
        "kernels",
        "slow",
        "not compiled, and there is no C compiler (cc)",
        "torch computes, slower, and no quantization: install gcc, or a wheel that carries the kernels",
    )


def memory(root: Path) -> Finding:
    free, total = machine.available_memory(root), machine.total_memory(root)
    text = f"{free / _GIB:.1f} GiB available of {total / _GIB:.1f} GiB, limits of containers included"
    if machine.address_limit() is not None:
        text += f", addresses limited to {(machine.address_limit() or 0) / _GIB:.1f} GiB (ulimit -v)"
    if free < _LITTLE_MEMORY:
        return Finding("memory", "slow", text, "models of more than 0.5 billion weights will hardly fit")
    return Finding("memory", "good", text)


def huge_pages(root: Path) -> Finding:
    try:
        words = (root / _HUGE_PAGES).read_text().split()
    except OSError:
        words = []
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "unknown")
    if chosen in ("always", "madvise"):
        return Finding("huge pages", "good", chosen)
    return Finding(
        "huge pages",
        "slow",
        chosen,
        f"weights are read up to 1.5 times as fast with them: as root, echo madvise > /{_HUGE_PAGES}",
    )


def cuda(root: Path, build: str | None, cards: str) -> Finding:
    """Whether torch, built for this version of CUDA or for none, can use what nvidia-smi calls `cards`."""
    reason = nvidia.why_unusable(build, root)
    if cards:
        return Finding("CUDA", "slow" if reason else "good", cards, reason or "")
    if nvidia.cards_here(root):
        return Finding("CUDA", "slow", "a device without nvidia-smi", reason or "the driver is not complete")
    return Finding("CUDA", "note", "no device; models run on the processor", reason or "")


def triton(compiler: str | None, headers: Path, libraries: str) -> Finding:
    """What Triton needs to start kernels on a card. `libraries` is what `ldconfig -p` lists."""
    wanted = (
        ("a C compiler (gcc)", compiler is not None),
        ("Python's headers (python3-dev)", (headers / "Python.h").is_file()),
        ("libcuda.so.1 in the list of ldconfig -p (run ldconfig as root)", "libcuda.so.1" in libraries),
    )
    missing = [name for name, there in wanted if not there]
    if missing:
        return Finding(
            "Triton", "slow", f"without {', '.join(missing)}", "no kernel can be started on the card"
        )
    return Finding("Triton", "good", "a C compiler, Python's headers and libcuda.so.1 are there")


def _cuda_here(root: Path) -> Iterator[Finding]:
    yield cuda(root, cuda_of_torch(), _cards())
    if nvidia.cards_here(root):
        headers = Path(sysconfig.get_paths()["include"])
        yield triton(
            shutil.which("gcc") or shutil.which("clang"), headers, _printed_by("/sbin/ldconfig", "-p")
        )


def cuda_of_torch() -> str | None:
    """The version of CUDA that torch is built for, read without importing it; None for CPUs."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    said = re.search(r"^cuda\b.*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.M)
    return said[1] if said else None


def _cards() -> str:
    """Names, memory and driver of the GPUs, one after the other; empty if there are none."""
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return "; ".join(_printed_by("nvidia-smi", *query).strip().splitlines())


def _printed_by(name: str, *arguments: str) -> str:
    """What a program prints; "" if it is not there, or fails."""
    program = shutil.which(name)
    if program is None:
        return ""
    try:
        command = [program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _descriptors() -> Finding:
    if reason := why_too_few_descriptors():
        return Finding("file descriptors", "broken", "too few", reason)
    return Finding("file descriptors", "good", "enough")


def caches(folder: Path) -> Finding:
    """Whether the folder for compiled kernels and tokenizers can be used."""
    try:
        make_private(folder)
    except OSError as error:
        return Finding(
            "cache folder",
            "slow",
            f"{folder}: {error.strerror or error}",
            "kernels are compiled at every start, and tokenizers converted: set XDG_CACHE_HOME to a folder "
            "of this user's",
        )
    return Finding("cache folder", "good", str(folder))


def checkpoints(folder: Path) -> Finding:
    """Whether models of the hub can be downloaded to this folder."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{folder}: {free / _GIB:.0f} GiB free"
    if not os.access(there, os.W_OK):
        return Finding(
            "models", "slow", text, "it cannot be written: no model can be downloaded; set HF_HOME"
        )
    if free < _LITTLE_DISK:
        return Finding("models", "slow", text, "larger models cannot be downloaded: set HF_HOME")
    return Finding("models", "good", text)


def _hub_cache() -> Path:
    from huggingface_hub import constants  # it reads HF_HOME and its kin as downloads do

    return Path(constants.HF_HUB_CACHE)


def model_name(cpuinfo: Path) -> str:
    """The processor's name, or its kind where the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or os.uname().machine


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


FAILED = 1

_MARKS = {"good": "ok", "note": "ok", "slow": "slow", "broken": "BROKEN"}
_PACKAGES = (
    *("facet-serve", "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy"),
    *("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pyzmq", "msgspec", "pydantic", "jinja2"),
    *("llguidance", "ray", "triton"),
)


def run(arguments: Sequence[str], command: str, api_key: str | None) -> int:
    """Prints what was found. The exit code is 1 if something keeps every server from starting here."""
    parser = parser_of(command, "Look at this machine: what it has, what is missing, and what that costs.")
    parser.add_argument("--report", action="store_true", help="Text for a bug report: versions, too.")
    parser.add_argument("--json", action="store_true", help="The findings as JSON.")
    given = parser.parse_args(arguments)
    findings = list(examine())
    if given.json:
        print(json.dumps([asdict(one) for one in findings], indent=2))
    elif given.report or command.endswith("collect-env"):
        print(report(findings))
    else:
        print("\n".join(map(_line, findings)))
        print(_verdict(findings))
    return FAILED if any(one.grade == "broken" for one in findings) else 0


def report(findings: Sequence[Finding]) -> str:
    """Versions and findings as text that names neither user nor host."""
    home = os.path.expanduser("~")
    lines = [
        f"system: {platform.system()} {platform.release()} {platform.machine()}",
        f"libc: {' '.join(platform.libc_ver())}",
        f"python: {platform.python_implementation()} {platform.python_version()}",
        *(f"{name}: {version_of(name)}" for name in _PACKAGES),
        *map(_line, findings),
    ]
    text = "\n".join(lines)
    return text.replace(home, "~") if len(home) > 1 else text


def _line(one: Finding) -> str:
    line = f"{_MARKS[one.grade]:6} {one.name}: {one.text}"
    return f"{line}\n       {one.cost}" if one.cost else line


def _verdict(findings: Sequence[Finding]) -> str:
    broken = [one.name for one in findings if one.grade == "broken"]
    slow = [one.name for one in findings if one.grade == "slow"]
    if broken:
        return f"No model can be served here before this is repaired: {', '.join(broken)}."
    if slow:
        return f"Models can be served here; these make them slower than they need be: {', '.join(slow)}."
    return "Models can be served here."
