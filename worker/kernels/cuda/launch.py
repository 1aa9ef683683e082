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

ALIGNED = 16
"""Triton compiles variants of their own for pointers and numbers that this does not divide."""


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


_CONSTANT, _SPECIALIZED, _FREE = range(3)
"""The parts of arguments in the choice of a variant: by value, by what Triton specializes for, by width."""


@dataclass(frozen=True, slots=True)
class _Variants:
    """What was compiled of a kernel, by what Triton compiles for."""

    parts: tuple[int, ...] | None
    """The part of each argument; None if the kernel is interpreted."""
    compiled: dict[tuple[Any, ...], Any]

    @classmethod
    def of(cls, kernel: Any) -> _Variants:
        params = getattr(kernel, "params", None)
        if params is None:
            return cls(None, {})
        parts = (
            _CONSTANT if param.is_constexpr else _FREE if param.do_not_specialize else _SPECIALIZED
            for param in params
        )
        return cls(tuple(parts), {})


_take: Callable[[Call], None] | None = None
_known: dict[Any, _Variants] = {}
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

    A call for which Triton would choose the variant of an earlier one starts what that one compiled: to find
    that out takes less than Triton's binder. A process has one card, so its number is no part of the key.
    """
    if _take is not None:
        _take(Call(kernel, grid, arguments, options))
        return
    variants = _known.get(kernel)
    if variants is None:
        variants = _known[kernel] = _Variants.of(kernel)
    if variants.parts is None:
        kernel[grid](*arguments, **options)
        return
    addresses = 0
    words: list[Any] = [tuple(options.items())]
    for argument, part in zip(arguments, variants.parts, strict=False):  # some have defaults
        if isinstance(argument, Tensor):
            addresses |= argument.data_ptr()
            words.append(argument.dtype)
        elif argument.__class__ is int:
            if part == _CONSTANT:
                words.append(argument)
            elif 1 < argument < 1 << 31:  # nearly all are: a call less
                words.append(part == _SPECIALIZED and argument % ALIGNED == 0)
            else:
                words.append(_what_counts(argument, part))
        elif argument.__class__ is float and part != _CONSTANT:
            words.append(float)
        else:
            words.append((argument.__class__, argument))
    if addresses % ALIGNED:
        kernel[grid](*arguments, **options)
        return
    key = tuple(words)
    compiled = variants.compiled.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*arguments)
        return
    variants.compiled[key] = kernel[grid](*arguments, **options)


def _what_counts(number: int, part: int) -> int:
    """What of a number that is no constant decides over a variant."""
    width = (number if number >= 0 else ~number).bit_length() >> 5  # 32 bits, 64, or 64 without a sign
    if part == _FREE:
        return width
    return -1 if number == 1 else 2 * width + (number % ALIGNED == 0)


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
