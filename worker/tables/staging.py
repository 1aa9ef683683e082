"""The one copy from host to device of each step: all that a step brings is written into an int32 buffer.

`Packet.ints` and `Packet.floats` write on the host and hand out the tensor on the device at once; it holds
the values after `send`. Buffers form a ring, because the device may still read those of the steps ahead. A
form (of a recorded step) goes to the same place on the device every time, which copies reach in the order of
steps. Every tensor begins at a multiple of 16 bytes: kernels would be compiled anew for other addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

MakeBuffer = Callable[[int], tuple[Tensor, Tensor]]
"""The type of `Device.staging_buffer`: so many int32 words on the host, and their copy on the device."""

_MULTIPLE = 4
"""The words of which a tensor's beginning is a multiple."""


@dataclass(frozen=True, slots=True)
class Column:
    """A part of a form: some numbers, and the one that fills them up to its length."""

    values: Sequence[int] | np.ndarray
    fill: int
    length: int


def columns_of(buffer: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The columns of a form that begins at the beginning of a buffer."""
    starts = [0, *accumulate(map(_padded, lengths))]
    return [buffer[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def _padded(words: int) -> int:
    return -(-words // _MULTIPLE) * _MULTIPLE


class Packet:
    def __init__(self, make_buffer: MakeBuffer, words: int) -> None:
        self._make_buffer = make_buffer
        self._full: list[tuple[Tensor, Tensor]] = []
        """What is sent, on the host and on the device."""
        self._take_buffer(words)

    def reset(self) -> None:
        self._used, self._on_device, self._room = 0, self._own_on_device, len(self._words)
        self._full.clear()

    def ints(self, values: ArrayLike) -> Tensor:
        words = np.asarray(values, dtype=np.int32)
        if self._used + len(words) > self._room:
            self._grow(len(words))
        start, stop = self._used, self._used + len(words)
        self._words[start:stop] = words
        self._used = -(-stop // _MULTIPLE) * _MULTIPLE
        return self._on_device[start:stop]

    def floats(self, values: ArrayLike) -> Tensor:
        return self.ints(np.asarray(values, dtype=np.float32).view(np.int32)).view(torch.float32)

    def begin_form(self, buffer: Tensor, columns: Sequence[Column]) -> None:
        """Begin with some columns, each of which is filled up.

        They lie at the beginning of `buffer`, on the device, in every step: recordings read them there, where
        `columns_of` finds them. What follows lies behind them.
        """
        words = sum(_padded(column.length) for column in columns)
        if words > len(self._words):  # parts of a form never lie elsewhere
            self._take_buffer(2 * words)
        self._on_device, self._room = buffer, min(len(self._words), len(buffer))
        for column in columns:
            filled = np.full(column.length, column.fill, np.int32)
            filled[: len(column.values)] = column.values
            self.ints(filled)

    def send(self) -> None:
        if self._host is not self._on_device:
            self._close_buffer()
        for host, on_device in self._full:
            on_device.copy_(host, non_blocking=True)

    def _grow(self, words: int) -> None:
        """Long prompts outgrow the buffer: it is sent as it is, and a larger one is used from now on."""
        self._close_buffer()
        self._take_buffer(2 * max(words, len(self._host)))

    def _close_buffer(self) -> None:
        """Have the buffer sent as it is, unless the device computes in it."""
        if self._host is not self._on_device:
            self._full.append((self._host[: self._used], self._on_device[: self._used]))

    def _take_buffer(self, words: int) -> None:
        self._host, self._own_on_device = self._make_buffer(words)
        self._words, self._on_device, self._used = self._host.numpy(), self._own_on_device, 0
        self._room = len(self._words)


class Staging:
    def __init__(self, make_buffer: MakeBuffer, steps_ahead: int, words: int) -> None:
        """A step's result is read before the step `steps_ahead + 1` later starts: one more packet will do."""
        self._ring = [Packet(make_buffer, words) for _ in range(steps_ahead + 2)]
        self._next = 0

    def open(self) -> Packet:
        packet = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        packet.reset()
        return packet
