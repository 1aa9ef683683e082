"""Vectors of somebody's index: which numbers they are, and how near they are to vectors that we make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from server.errors import BadRequest

Floats = NDArray[np.floating]
Kind = Literal["float32", "float16", "bfloat16", "int8", "uint8", "binary"]

LEAST_SAMPLES, MOST_SAMPLES = 4, 64
_MOST_WIDTH = 1 << 16
_FITTED = 8
"""The samples that are needed to find the scale of each dimension of whole numbers."""


@dataclass(frozen=True, slots=True)
class Given:
    """Vectors [N, D] of N texts, as an index has them."""

    texts: list[str]
    rows: Floats
    kind: Kind
    left_out: list[str]
    """A sentence on each sample that cannot be used."""

    @property
    def width(self) -> int:
        return self.rows.shape[1]

    @property
    def lengths(self) -> Floats | None:
        """The length of each vector; None of whole numbers, whose scale says nothing."""
        return np.linalg.norm(self.rows, axis=1) if self.is_float else None

    @property
    def is_float(self) -> bool:
        return self.kind in ("float32", "float16", "bfloat16")

    def nearness(self, made: Floats, members: Sequence[int]) -> Floats:
        """How near some samples are to vectors made [n, W]: cosines, or of bits the part that agrees."""
        rows = self.rows[list(members)]
        width = rows.shape[1]
        if self.kind in ("binary", "int8", "uint8") and 8 * width == made.shape[1]:
            return _agreement(_unpacked(rows), made)
        if width > made.shape[1]:
            return np.zeros(len(rows))
        made = made[:, :width]
        if self.kind == "binary":
            return _agreement(rows > 0, made)
        direct = _cosines(rows, made)
        if self.is_float or len(rows) < _FITTED:
            return direct
        fitted = np.full(len(rows), _correlation(rows, made))
        return fitted if fitted[0] > np.median(direct) else direct

    def are_bits(self, width: int) -> bool:
        """Whether they are the signs of vectors of so many numbers."""
        return self.kind == "binary" or (not self.is_float and 8 * self.width == width)


def read_given(texts: Sequence[str], vectors: Sequence[object]) -> Given:
    """Leaves out what cannot be used, and finds which numbers the others are.

    Raises BadRequest if too few are left.
    """
    found: list[tuple[str, Floats]] = []
    left_out: list[str] = []
    for index, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        row = _as_row(vector)
        if isinstance(row, str):
            left_out.append(f"sample {index} {row}")
        elif not text.strip():
            left_out.append(f"sample {index} has an empty text")
        else:
            found.append((text, row))
    widths = [len(row) for _, row in found]
    usual = max(set(widths), key=widths.count, default=0)
    left_out += [f"a vector has {width} numbers, and most have {usual}" for width in widths if width != usual]
    kept = [(text, row) for text, row in found if len(row) == usual]
    if len(kept) < LEAST_SAMPLES:
        why = f": {'; '.join(left_out[:3])}" if left_out else ""
        raise BadRequest(
            f"At least {LEAST_SAMPLES} texts with vectors are needed, better 32 of different lengths; "
            f"{len(kept)} can be used{why}.",
            "samples",
        )
    kept = kept[:MOST_SAMPLES]
    rows = np.stack([row for _, row in kept])
    kind = _kind(rows)
    if kind not in ("binary", "int8", "uint8"):
        used = np.flatnonzero(np.any(rows != 0, axis=0))
        rows = rows[:, : used[-1] + 1]  # a column for longer vectors is filled with zeros
    return Given([text for text, _ in kept], rows, kind, left_out)


def _as_row(vector: object) -> Floats | str:
    try:
        row = np.asarray(vector, np.float32)
    except (TypeError, ValueError, OverflowError):
        return "has a vector that is no list of numbers"
    if row.ndim != 1 or not 0 < row.size <= _MOST_WIDTH:
        return "has no vector" if row.size == 0 else "has a vector that is no plain list of numbers"
    if not np.isfinite(row).all():
        return "has a vector with NaN or infinite numbers"
    return row if row.any() else "has a vector of zeros"


def _kind(rows: Floats) -> Kind:
    if (rows == np.rint(rows)).all():
        if set(np.unique(rows)) <= {-1.0, 0.0, 1.0}:
            return "binary"
        if rows.min() >= -128 and rows.max() <= 127 and rows.min() < 0:
            return "int8"
        if rows.min() >= 0 and rows.max() <= 255:
            return "uint8"
    with np.errstate(over="ignore"):
        if (rows.astype(np.float16).astype(np.float32) == rows).all():
            return "float16"
    low = rows.astype(np.float32).view(np.uint32) & 0xFFFF
    return "bfloat16" if not low.any() else "float32"


def _unpacked(rows: Floats) -> NDArray[np.bool_]:
    """The bits of bytes [n, D] -> [n, 8 D]; signed ones are 128 lower."""
    whole = rows.astype(np.int16) + (128 if rows.min() < 0 else 0)
    return np.unpackbits(whole.astype(np.uint8), axis=1).astype(bool)


def _agreement(bits: NDArray[np.bool_], made: Floats) -> Floats:
    return (bits == (made > 0)).mean(axis=1)


def _cosines(one: Floats, other: Floats) -> Floats:
    one, other = one.astype(np.float64), other.astype(np.float64)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return (one * other).sum(axis=1) / np.where(lengths, lengths, 1)


def _correlation(rows: Floats, made: Floats) -> float:
    """How well whole numbers are a scale and a shift of each dimension: the mean of their correlations."""
    made = made / np.linalg.norm(made, axis=1, keepdims=True)
    one, other = rows - rows.mean(axis=0), made - made.mean(axis=0)
    spread = np.linalg.norm(one, axis=0) * np.linalg.norm(other, axis=0)
    used = spread > 0
    return float(((one * other).sum(axis=0)[used] / spread[used]).mean()) if used.any() else 0.0
