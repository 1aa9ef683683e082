"""Masks the tokens that may not be sampled in rows whose bounds follow their step.

A step that samples such rows waits for its `StepBounds` when its logits are there, and not before. It fails
closed: without them, or if they are not exactly those of its bound rows, the step breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.protocol import Bound, StepBounds
from worker.sampling.grouped_logits import slice_rows

NextBounds = Callable[[], StepBounds]
"""The type of a function that waits for the next bounds, which come in the order of their steps."""

WORD = 32
"""The tokens for which a word of bits speaks."""


def nothing_follows() -> StepBounds:
    """Raise, because nobody tells bounds."""
    raise ValueError("a step has bound rows, and nobody tells their bounds")


@dataclass(frozen=True, slots=True)
class RowBits:
    """The bounds of some rows of logits, as bits: 1 where a token may be sampled."""

    rows: np.ndarray  # [N] int64
    words: np.ndarray  # [N, W] int32, the lowest bit first


Forbid = Callable[[Tensor, RowBits], None]
"""The type of a function that makes the logits [R, V] float32 of what may not be sampled -inf, in place."""


def row_bits(told: StepBounds, bound: Mapping[int, Sequence[int]], vocab_size: int) -> RowBits | None:
    """The bounds of rows, by `bound`: slot -> rows, but for those that may sample anything; None: all may."""
    came = sorted([*told.rows, *(slot for slot, each in told.guesses.items() for _ in each)])
    due = sorted([slot for slot, rows in bound.items() for _ in rows])
    if came != due:
        raise ValueError(f"step {told.number}: bounds came for slots {came}, and {due} are bound")
    told_rows = {slot: [each, *told.guesses.get(slot, ())] for slot, each in told.rows.items()}
    bounds = [
        (row, each)
        for slot, rows in bound.items()
        for row, each in zip(rows, told_rows[slot], strict=True)
        if each is not None
    ]
    if not bounds:
        return None
    count = -(-vocab_size // WORD)
    words = np.frombuffer(bytearray().join([_bits(each, count, vocab_size) for _, each in bounds]), "<i4")
    return RowBits(np.array([row for row, _ in bounds], np.int64), words.reshape(len(bounds), count))


def _bits(bound: Bound, count: int, vocab_size: int) -> bytes:
    """The bits of one row in so many words. Tokens of which bits say nothing are forbidden."""
    size = 4 * count
    if bound.form == "bits":
        return bound.data if len(bound.data) == size else bound.data[:size].ljust(size, b"\0")
    ids = np.frombuffer(bound.data, "<i4")
    ids = ids[(ids >= 0) & (ids < vocab_size)]
    words = np.zeros(count, "<u4")
    np.bitwise_or.at(words, ids // WORD, np.uint32(1) << (ids % WORD).astype(np.uint32))
    return (~words if bound.form == "forbidden" else words).tobytes()


def forbid(logits: Tensor, bits: RowBits) -> None:
    """Forbid by plain torch, on any device."""
    width = logits.shape[1]
    rows, words = _move(bits.rows, logits.device), _move(bits.words, logits.device)
    places = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    size = slice_rows(width)
    for some, of in zip(rows.split(size), words.split(size), strict=True):
        allowed = ((of[:, :, None] >> places) & 1).flatten(1)[:, :width]  # [n, V]
        logits[some] = torch.where(allowed == 1, logits[some], -torch.inf)


def _move(values: np.ndarray, target: torch.device) -> Tensor:
    """A copy on the device. It goes through pinned memory, or the host would wait for all that is queued."""
    moved = torch.from_numpy(values)
    return moved if target.type == "cpu" else moved.pin_memory().to(target, non_blocking=True)
