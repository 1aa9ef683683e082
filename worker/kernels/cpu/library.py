"""The C kernels as a library: for which processors it is built, how, and where from. No torch.

The sources in `csrc/` are compiled for each `Level` of processor; a wheel may carry the results in `built/`.
Where it does not, a C compiler makes the one that this machine needs at first use, in half a minute on
two cores, and it stays in a cache folder. Its name holds a digest of sources and flags, so that a stale one
is never found. `python -m worker.kernels.cpu.library` makes it beforehand, as `make` does while packages are
installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path
from typing import Any

from worker.host.machine import cache_folder, environment_with, usable_cores
from worker.host.private_folder import check_room, is_trusted, make_private, taking_turns

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parents[1] / "built"

_POINTER, FLOAT = ctypes.c_void_p, ctypes.c_float
_NUMBERS = {"long": ctypes.c_long, "int": ctypes.c_int, "float": FLOAT}
_PROTOTYPE = re.compile(r"^EXPORT (\w+) (\w+)\(([^)]*)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of processor: the features that /proc/cpuinfo must list, and the compiler's flags."""

    name: str
    needs: tuple[str, ...]
    flags: tuple[str, ...]
    machine: str = "x86_64"


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_BF16_NEEDS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "fma", "bmi2")
_AMX_NEEDS = ("amx_tile", "amx_bf16", "amx_int8")

LEVELS = (  # the best first
    Level("amx", (*_BF16_NEEDS, *_AMX_NEEDS), (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    Level("avx512bf16", _BF16_NEEDS, _BF16),
    Level("avx512", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "bmi2"), _AVX512),
    Level("avx2", ("avx2", "fma", "f16c", "bmi2"), _AVX2),
    Level("neon", ("asimd",), ("-Wno-psabi",), "aarch64"),  # no vector is passed to other libraries
)

# Explicit instructions instead of -march=native, for caches are shared; and not -ffast-math: masks are
# infinite, and NaN must be seen. Without contraction a number is rounded where the source says so.
# A checkpoint says how long rows are, so no array on the stack may be as long as a variable says.
_FLAGS = (
    *("-O3", "-std=gnu11", "-fno-math-errno", "-ffp-contract=off"),
    *("-pthread", "-fPIC", "-fvisibility=hidden", "-Werror=vla", "-Werror=alloca"),
)
_LINK_FLAGS = ("-pthread", "-shared", "-Wl,-Bsymbolic")


_ROOM = 8 << 20
"""Bytes that a build needs; objects and library together have a fifth of it."""
_LONGEST_BUILD = 120.0
"""Seconds to wait for another process that compiles the same; it may have been stopped meanwhile."""
_SCRATCH = "build-"
"""How the names of the temporary folders of builds begin."""


class BuildError(RuntimeError):
    """The library cannot be built or used on this machine; the message says why."""


Record = Callable[[str, int | None, Sequence[Any], Sequence[Any]], None]
"""The type of a function that gets a call in place of the kernel: the kernel's name, the address of its entry
for `replay`, types of arguments, arguments."""


Kernel = Callable[..., Any]
"""The type of a C kernel, which takes a tensor as its `data_ptr()`, and None as the null pointer."""


class Library:
    """The kernels of a level, loaded into this process."""

    def __init__(self, level: Level, path: Path) -> None:
        self.level = level
        self.path = path
        self._record: Record | None = None
        self._long = ctypes.CDLL(str(path))
        self._quick = ctypes.PyDLL(str(path))

    def function(self, name: str, *, quick: bool = False) -> Kernel:
        """The kernel of this name.

        `quick`: it takes microseconds, and giving up the interpreter lock meanwhile would cost more.
        """
        function, entry = self.unrecorded(name, quick=quick), self._entry(name)
        arguments = function.argtypes

        def call(*given: Any) -> Any:
            if self._record is not None:
                return self._record(name, entry, arguments, given)
            return function(*given)

        return call

    def unrecorded(self, name: str, *, quick: bool = False) -> Any:
        """The same, for a kernel that is no part of a forward pass: it is called in fewer calls."""
        function = getattr(self._quick if quick else self._long, name)
        function.restype, function.argtypes = _prototypes(SOURCES)[name]
        return function

    @contextmanager
    def record_to(self, record: Record) -> Iterator[None]:
        """Hand all calls to `record` instead of making them."""
        self._record = record
        try:
            yield
        finally:
            self._record = None

    def _entry(self, name: str) -> int | None:
        """The address of the variant of a kernel that takes its arguments as words, if there is one."""
        with suppress(AttributeError):
            return ctypes.cast(self._long[f"{name}_words"], ctypes.c_void_p).value
        return None


@remember
def _prototypes(folder: Path) -> dict[str, tuple[Any, list[Any]]]:
    """The types of the result and of the arguments of each kernel, read from the C sources."""
    prototypes: dict[str, tuple[Any, list[Any]]] = {}
    for source in folder.glob("*.c"):
        for result, name, arguments in _PROTOTYPE.findall(source.read_text()):
            each = [] if arguments == "void" else arguments.split(",")
            types = [_POINTER if "*" in one else _NUMBERS[one.split()[-2]] for one in each]
            prototypes[name] = _NUMBERS.get(result), types
    return prototypes


def processor_text(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """What the system says of its first processor, but for what changes while it runs."""
    first = cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.exists() else platform.processor()
    return [line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogomips"))]


def levels_here(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[Level]:
    """The levels that this processor can run, the best first."""
    levels = _of_this_machine() if cpuinfo.exists() else []
    for line in cpuinfo.read_text().splitlines() if levels else ():
        if line.startswith(("flags", "Features")):
            flags = set(line.split())
            return [level for level in levels if flags.issuperset(level.needs)]
    return []


def _of_this_machine() -> list[Level]:
    """The levels of processors that execute what this one's compiler makes."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return [level for level in LEVELS if level.machine == machine]


def open_library(level: Level, cache: Path | None = None) -> Library:
    """Load a library from the wheel or the cache, or compile it now. Raises BuildError."""
    with suppress(OSError):  # none, or one that was made for another system
        return Library(level, _brought(level))
    cache = cache or cache_folder()
    try:
        return _open_kept(level, cache)
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s (%s): each start compiles them", cache, error)
    try:
        with tempfile.TemporaryDirectory(prefix="facet-") as folder:
            return Library(level, build(level, Path(folder)))  # stays mapped when the file is gone
    except OSError as error:
        raise BuildError(f"the compiled library cannot be used: {error}") from None


def prepare(cache: Path | None = None) -> None:
    """Compile what `open_library` would, before it is called. Raises BuildError, or OSError."""
    for level in levels_here()[:1]:
        if not _brought(level).exists():
            _find_or_build(level, cache or cache_folder())


def where_built(level: Level, cache: Path) -> Path | None:
    """The path of the compiled library that `open_library` would use; None if it would have to compile."""
    kept = cache / _file_name(level)
    if _brought(level).exists():
        return _brought(level)
    return kept if is_trusted(kept) else None


def _open_kept(level: Level, cache: Path) -> Library:
    """Load the library in the cache, which is compiled again if it cannot be loaded. Raises OSError."""
    path = _find_or_build(level, cache)
    try:
        return Library(level, path)
    except OSError:
        path.unlink()
        return Library(level, _find_or_build(level, cache))


def _find_or_build(level: Level, cache: Path) -> Path:
    """The library in the cache, which one process compiles. Raises OSError if others could change it."""
    make_private(cache)
    path = cache / _file_name(level)
    if is_trusted(path):
        return path
    with taking_turns(cache, _LONGEST_BUILD):
        return path if is_trusted(path) else build(level, cache)


def build(level: Level, folder: Path) -> Path:
    """Compile a level's library into a folder. Raises BuildError, and OSError if that cannot be written."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BuildError("there is no C compiler (cc)")
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    # In a temporary folder, and then moved: another process may be doing the same.
    with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
        check_room(Path(scratch), _ROOM)
        logger.info(
            "compiling the C kernels for this processor, which takes half a minute, on a busy machine two"
        )
        try:
            result = _compile(compiler, level, Path(scratch))
        except BuildError:
            check_room(Path(scratch), _ROOM)  # the disk may be full by now, which compilers tell in many ways
            raise
        result.chmod(0o755)
        path = result.replace(folder / _file_name(level))
    logger.info("compiled the C kernels for this processor in %.1f s: %s", time.monotonic() - started, path)
    return path


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders of builds whose processes were killed."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError):  # its build has just ended
            if time.time() - scratch.stat().st_mtime > 2 * _LONGEST_BUILD:
                shutil.rmtree(scratch)


_LONGEST = {
    "tile_quantized.c",
    "tile_runs.c",
    "tile_shifts.c",
    "attention.c",
    "attention_latent.c",
    "tile_floats.c",
    "tile_vec.c",
}
"""The sources that take three quarters of the time: compiled first, so that all threads end together."""


def _compile(compiler: str, level: Level, scratch: Path) -> Path:
    environment = environment_with(TMPDIR=str(scratch))  # a full /tmp is no reason to fail

    def run(*arguments: str) -> None:
        done = subprocess.run(
            [compiler, *arguments], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode:
            first = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
            raise BuildError(f"{compiler} could not compile the kernels: {first}")

    def compiled(source: Path) -> str:
        result = str(scratch / f"{source.stem}.o")
        run(*_FLAGS, *level.flags, "-c", str(source), "-o", result)
        return result

    sources = sorted(SOURCES.glob("*.c"), key=lambda source: source.name not in _LONGEST)
    with ThreadPoolExecutor(usable_cores()) as pool:
        objects = list(pool.map(compiled, sources))
    result = scratch / "library.so"
    run(*_LINK_FLAGS, *objects, "-o", str(result), "-lm")
    return result


def build_all(folder: Path) -> list[Path]:
    """Fill a folder of a wheel with every level of this kind of machine, from the cache where it has them."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_built_for_wheel(level, folder) for level in _of_this_machine()]


def _built_for_wheel(level: Level, folder: Path) -> Path:
    try:
        return Path(shutil.copy2(_find_or_build(level, cache_folder()), folder))
    except OSError:  # the cache folder cannot be used
        return build(level, folder)


def _brought(level: Level) -> Path:
    """The path of the library that a wheel brings."""
    return BUILT / _file_name(level)


def _file_name(level: Level) -> str:
    digest = hashlib.sha256(" ".join((*_FLAGS, *_LINK_FLAGS, *level.flags)).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"kernels-{level.name}-{digest.hexdigest()[:16]}.so"


if __name__ == "__main__":
    with suppress(BuildError, OSError):  # the first start meets it again, and reports it
        prepare()
