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

_MOST_READY = 4096
_ALIGNED = 16
"""Triton compiles a variant of its own for pointers that this does not divide."""


@dataclass(frozen=True, slots=True)
class Call:
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


_take: Callable[[Call], None] | None = None
_ready: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by all that was said in a call but addresses and the grid."""
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
    """Start a kernel of so many programs. `options` are Triton's: `num_warps`, `num_stages`.

    A call that differs from an earlier one in addresses and the grid alone starts what that one compiled: to
    find that out takes less than Triton's binder, which looks at each argument's part in the choice of a
    variant. A process has one card, so its number is no part of the key.
    """
    if _take is not None:
        _take(Call(kernel, grid, arguments, options))
        return
    addresses, words = 0, [kernel, tuple(options.items())]
    for argument in arguments:
        if isinstance(argument, Tensor):
            addresses |= argument.data_ptr()
            words.append(argument.dtype)
        else:
            words.append(argument if argument.__class__ is int else (argument.__class__, argument))
    if addresses % _ALIGNED:
        kernel[grid](*arguments, **options)
        return
    key = tuple(words)
    compiled = _ready.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*arguments)
        return
    compiled = kernel[grid](*arguments, **options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_ready) == _MOST_READY:
            _ready.clear()
        _ready[key] = compiled


@contextmanager
def taking(take: Callable[[Call], None]) -> Iterator[None]:
    """Give the kernels that would be started to `take`."""
    global _take
    outer, _take = _take, take
    try:
        yield
    finally:
        _take = outer


@contextmanager
def collecting() -> Iterator[list[Call]]:
    """Collect the kernels that would be started, which may then have tensors without memory (`meta`)."""
    calls: list[Call] = []
    with taking(calls.append):
        yield calls
