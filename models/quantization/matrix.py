"""The one form that every quantized matrix is read into: codes, and the scales of their groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from models.quantization.coding import E4M3, WHOLE

_MOST_IN_GROUP = 128
"""Inputs of the largest groups that kernels know. Larger ones are divided: all pieces have the same scale."""
_PADDED = 16
"""The multiple to which groups are filled up that have different lengths."""


@dataclass(frozen=True, eq=False)
class Grouped:
    """A matrix [N, inputs] of elements `scale * (code - offset)`, with a scale for each group of a row."""

    codes: Tensor
    """[N, K] uint8, with any strides: one code of `bits` bits each."""
    bits: int
    group: int
    """The columns that share a scale; the last group may have fewer. 0 means all columns."""
    scales: Tensor
    """[N, groups] float16, bfloat16 or float32."""
    offsets: Tensor | None
    """[N, groups] uint8, the codes that stand for 0; None: it is the middle one, 2^(bits - 1)."""
    inputs: int
    dtype: torch.dtype
    """The number type of the model, in which inputs come and to which the matrix may be widened."""
    order: Tensor | None = None
    """[K] int32: the input that each column is multiplied with, or -1 for none; None: as they come."""
    input_bits: int = 16
    """The bits to which a kernel may round inputs: 16, which loses nothing that could be measured, or 8."""
    kind: str = WHOLE
    """What codes mean: WHOLE or E4M3, which has no offsets and whose inputs are not rounded."""

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def plain_bytes(self) -> int:
        """The bytes of the matrix in the number type of the model."""
        return len(self) * self.inputs * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> Grouped:
        offsets = None if self.offsets is None else self.offsets[start:stop]
        return replace(self, codes=self.codes[start:stop], scales=self.scales[start:stop], offsets=offsets)

    def padded(self, count: int) -> Grouped:
        """The same matrix with `count` more rows, of zeros."""
        offsets = None if self.offsets is None else F.pad(self.offsets, (0, 0, 0, count))
        codes, scales = (F.pad(tensor, (0, 0, 0, count)) for tensor in (self.codes, self.scales))
        return replace(self, codes=codes, scales=scales, offsets=offsets)

    def in_groups(self, sections: int | None = None) -> Grouped:
        """The same matrix in groups that kernels know, which begin anew with each section of the columns.

        `sections` is that of `ops.pack`. If there are any, even one, groups end with them: so the piece of a
        rank, which may be one section, has the groups that it has in the whole matrix.
        """
        columns = self.codes.shape[1]
        section = columns // (sections or 1)
        if self.group:
            size = gcd(self.group, _MOST_IN_GROUP, section if sections else 0)
        else:
            size = _MOST_IN_GROUP
        starts = torch.arange(0, section, size).add(torch.arange(sections or 1).unsqueeze(1) * section)
        index = (starts.flatten() // (self.group or columns)).to(self.scales.device)
        offsets = None if self.offsets is None else self.offsets[:, index]
        return replace(self, group=size, scales=self.scales[:, index], offsets=offsets)

    def widened(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [N, inputs], with its columns in the order of the inputs."""
        columns = self.codes.shape[1]
        plain = (self._numbers() * self._spread(self.scales.float(), columns)).to(dtype or self.dtype)
        if self.order is None:
            return plain
        found = self.order >= 0
        result = plain.new_zeros(len(self), self.inputs)
        result[:, self.order[found].long()] = plain[:, found]
        return result

    def _numbers(self) -> Tensor:
        """What the codes mean, without their scales, in float32."""
        if self.kind == E4M3:
            return self.codes.contiguous().view(torch.float8_e4m3fn).float()
        middle = 1 << (self.bits - 1)
        zeros = middle if self.offsets is None else self._spread(self.offsets.float(), self.codes.shape[1])
        return self.codes.float() - zeros

    def _spread(self, of_groups: Tensor, columns: int) -> Tensor:
        return of_groups.repeat_interleave(self.group or columns, dim=1)[:, :columns]


Matrix = Tensor | Grouped
"""What a layer reads from a checkpoint as its matrix [N, inputs]."""


def widen(matrix: Matrix) -> Tensor:
    return matrix.widened() if isinstance(matrix, Grouped) else matrix


def sorted_by_group(matrix: Grouped, group_of: Tensor) -> Grouped:
    """Lay columns whose groups `group_of` [K] names one group after the other.

    Groups that differ in length, as those of a piece of a matrix do, are filled up with columns of no input.
    """
    places = torch.arange(len(group_of), device=group_of.device)
    if not matrix.group or torch.equal(group_of, places // matrix.group):
        return matrix
    order = group_of.argsort(stable=True)
    counts = torch.bincount(group_of, minlength=matrix.scales.shape[1])
    if (counts[:-1] == matrix.group).all() and counts[-1] <= matrix.group:
        return replace(matrix, codes=matrix.codes[:, order], order=order.int())
    filled = -(-counts // _PADDED) * _PADDED
    shift = (filled - counts).cumsum(0) - (filled - counts)  # columns of no input ahead of each group
    places = places + shift[group_of[order]]
    total = int(filled.sum())
    codes = matrix.codes.new_zeros(len(matrix), total)
    codes[:, places] = matrix.codes[:, order]
    padded = torch.full((total,), -1, dtype=torch.int32, device=order.device)
    padded[places] = order.int()
    index = torch.arange(len(counts), device=order.device).repeat_interleave(filled // _PADDED)
    offsets = None if matrix.offsets is None else matrix.offsets[:, index]
    return replace(
        matrix, codes=codes, group=_PADDED, scales=matrix.scales[:, index], offsets=offsets, order=padded
    )


def from_column(matrix: Grouped, start: int) -> Grouped:
    """Correct the groups of a piece that begins with the column `start` of the whole matrix.

    `scales` and `offsets` are those of all groups that the piece touches. One that is cut is divided further.
    """
    shift = start % matrix.group if matrix.group else 0
    if not shift:
        return matrix
    size = gcd(matrix.group, shift)
    starts = torch.arange(shift, shift + matrix.codes.shape[1], size, device=matrix.scales.device)
    index = starts // matrix.group
    offsets = None if matrix.offsets is None else matrix.offsets[:, index]
    return replace(matrix, group=size, scales=matrix.scales[:, index], offsets=offsets)


def stacked(parts: Sequence[Matrix]) -> Matrix:
    """Join matrices row below row: into a grouped one if all have the same groups, else into a plain one."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, Grouped)]
    if len(grouped) < len(parts) or any(not alike(grouped[0], other) for other in grouped):
        return torch.cat([widen(part) for part in parts])
    offsets = None
    if any(part.offsets is not None for part in grouped):
        offsets = torch.cat([_offsets(part) for part in grouped])
    codes, scales = torch.cat([part.codes for part in grouped]), torch.cat([part.scales for part in grouped])
    return replace(grouped[0], codes=codes, scales=scales, offsets=offsets)


def halves(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """The upper and the lower half of the rows."""
    if isinstance(matrix, Grouped):
        middle = len(matrix) // 2
        return matrix.rows(0, middle), matrix.rows(middle, len(matrix))
    upper, lower = matrix.chunk(2)
    return upper, lower


def describe_sizes(parameters: Iterable[Tensor]) -> str:
    """The size of all weights, and what it would be if none were quantized, for the log."""
    stored, plain = 0, 0
    for parameter in parameters:
        stored += parameter.nbytes
        plain += getattr(parameter, "bytes_before", parameter.nbytes)
    if stored == plain:
        return f"widened to {stored / 2**30:.1f} GiB, because there are no kernels for them on this device"
    return f"{stored / 2**30:.1f} GiB of weights stand for {plain / 2**30:.1f}"


def alike(one: Grouped, other: Grouped) -> bool:
    """Whether two matrices can be joined row below row."""
    same_order = one.order is other.order or (
        one.order is not None and other.order is not None and torch.equal(one.order, other.order)
    )
    return (
        same_order
        and all(
            getattr(one, name) == getattr(other, name)
            for name in ("bits", "group", "dtype", "input_bits", "kind")
        )
        and one.scales.dtype == other.scales.dtype
    )


def _offsets(matrix: Grouped) -> Tensor:
    if matrix.offsets is not None:
        return matrix.offsets
    return torch.full_like(matrix.scales, 1 << (matrix.bits - 1), dtype=torch.uint8)
