"""The one way to start a kernel. Calls can be collected instead, to compile their variants ahead of time.

It also counts the kernels that this process has compiled: none should be while requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

from torch import Tensor
from triton import knobs

from worker.kernels.cuda.capabilities import HOPPER, Card


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel with arguments that decide its variant: types, constants, and which numbers 16 divides."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, int]

    def start(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.options)

    def prepare(self) -> Any:
        """Compile the kernel for this call, or find it in a cache, and do not start it."""
        return self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)


EARLY = {"launch_pdl": True}
"""The options of a kernel that may begin before the one ahead of it has ended, by a dependent launch.

It waits for that by itself before it reads or writes what others write.
"""
_take: Callable[[KernelLaunch], None] | None = None
_counters: Tensor | None = None
_compiled = 0
_counts = False
_counting = Lock()  # kernels are compiled in threads


def compilations() -> int:
    """The kernels that this process has compiled since it counts, without those found in Triton's cache."""
    return _compiled


def count_compilations() -> None:
    """Count from now on what Triton compiles, whoever asks for it."""
    global _counts
    if _counts:
        return
    _counts = True
    other = knobs.compilation.listener

    def heard(**told: Any) -> None:
        global _compiled
        with _counting:
            _compiled += not told["cache_hit"]
        if other is not None:
            other(**told)

    knobs.compilation.listener = heard


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> None:
    """Start a kernel of so many programs. `options` are Triton's: `num_warps`, `num_stages`, `maxnreg`."""
    call = KernelLaunch(kernel, grid, arguments, options)
    if _take is None:
        call.start()
    else:
        _take(call)


def power_of_2(count: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (count - 1).bit_length()


def padded(size: int) -> int:
    """The power of two, at least 16, that a tile takes for so many numbers."""
    return max(16, power_of_2(size))


def warps_for(numbers: int) -> int:
    """The warps of a program that holds one row of so many numbers in registers."""
    return min(16, max(1, numbers // 512))


def begins_early(card: Card) -> bool:
    """Whether kernels can begin before the one ahead of them has ended."""
    return card.capability >= HOPPER and not knobs.runtime.interpret


@contextmanager
def joining(counters: Tensor) -> Iterator[None]:
    """Let steps of few rows use kernels that do several operations each.

    Programs that wait for each other's results count themselves in `counters` int32, which are 0 and stay so.
    """
    global _counters
    outer, _counters = _counters, counters
    try:
        yield
    finally:
        _counters = outer


def joined() -> Tensor | None:
    """The counters of kernels that do several operations, if such are to be used."""
    return _counters


@contextmanager
def taking(take: Callable[[KernelLaunch], None]) -> Iterator[None]:
    """Give the kernels that would be started to `take`."""
    global _take
    outer, _take = _take, take
    try:
        yield
    finally:
        _take = outer


@contextmanager
def collecting() -> Iterator[list[KernelLaunch]]:
    """Collect the kernels that would be started, which may then have tensors without memory (`meta`)."""
    calls: list[KernelLaunch] = []
    with taking(calls.append):
        yield calls
