"""The one form that every quantized matrix is read into: codes, and the scales of their groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from models.weight_coding import E4M3, LEVELS, UNROUNDED, WHOLE

_MOST_IN_GROUP = 128
"""Inputs of the largest groups that kernels know. Larger ones are divided: all pieces have the same scale."""
_PADDED = 16
"""The multiple to which groups are filled up that have different lengths."""


@dataclass(frozen=True, eq=False)
class Factors:
    """Factors that make scales and minimums of small integers: one for each `run` of groups of a row."""

    run: int
    """The groups that share factors; the last run may have fewer."""
    scales: Tensor
    """[N, runs] float16, bfloat16 or float32: a group's scale is its whole number times this."""
    minimums: Tensor | None = None
    """[N, runs] of the same type: that of minimums; None if there are none."""


@dataclass(frozen=True, eq=False)
class Grouped:
    """A matrix [N, inputs] of elements `scale * number + minimum`, with a scale for each group of a row.

    The number is what a code means: `code - offset`, or one that a table holds.
    """

    codes: Tensor
    """[N, K] uint8, with any strides: one code of `bits` bits each."""
    bits: int
    """4, 5, 6 or 8."""
    group: int
    """The columns that share a scale; the last group may have fewer. 0 means all columns."""
    scales: Tensor
    """[N, groups] float16, bfloat16 or float32; with factors, uint8 or int8; or float8_e8m0fnu, powers of 2,
    which only kinds have whose code 0 means 0."""
    offsets: Tensor | None
    """[N, groups] uint8, the codes that stand for 0; None: it is `zero_code` everywhere."""
    inputs: int
    dtype: torch.dtype
    """The number type of the model, in which inputs come and to which the matrix may be widened."""
    order: Tensor | None = None
    """[K] int32: the input that each column is multiplied with, or -1 for none; None: as they come."""
    input_bits: int = 16
    """The bits to which a kernel may round inputs: 16, which loses nothing that could be measured, or 8."""
    input_scale: float | None = None
    """What inputs are divided by before they are rounded to 8 bits; None: by scales of their own."""
    kind: str = WHOLE
    """What codes mean, as in `weight_coding.py`, in the number type of the model. Only WHOLE has offsets."""
    minimums: Tensor | None = None
    """[N, groups] as scales: what is added to each element of a group. Then codes count from 0."""
    factors: Factors | None = None
    """What scales and minimums are to be multiplied with; None: nothing."""

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
        return self.each(lambda tensor: tensor[start:stop])

    def at(self, rows: Tensor) -> Grouped:
        """The same matrix with its rows in another order."""
        return self.each(lambda tensor: tensor[rows])

    def padded(self, count: int) -> Grouped:
        """The same matrix with `count` more rows, of zeros."""
        return self.each(lambda tensor: torch.cat([tensor, _zeros(tensor, count)]))

    def in_groups(self, sections: int | None = None) -> Grouped:
        """The same matrix in groups that kernels know, which begin anew with each section of the columns.

        `sections` is that of `ops.pack`. If there are any, even one, groups end with them: so the piece of a
        rank, which may be one section, has the groups that it has in the whole matrix.
        """
        columns = self.codes.shape[1]
        section = columns // (sections or 1)
        size = gcd(self.group, section if sections else 0) if self.group else _MOST_IN_GROUP
        run = gcd(self.run_columns, section if sections else 0)
        return self.regrouped(gcd(size, _MOST_IN_GROUP), run, sections or 1)

    def regrouped(self, size: int, run: int, sections: int = 1, first: int = 0) -> Grouped:
        """The same numbers in groups of `size` columns, and factors for `run` of them, if there are any.

        `run` is a number of columns. Each new group lies in one that there is, and so does each run; they
        begin anew with each section. The numbers of groups begin `first` columns ahead of the codes.
        """
        columns = self.codes.shape[1]
        width = columns // sections
        is_so = (size, run, first) == (self.group, self.run_columns, 0) and width % (run or size) == 0
        if is_so and self.scales.shape[1] * size == columns:
            return self
        sides = torch.arange(sections, device=self.scales.device).unsqueeze(1) * width + first

        def index(step: int, old: int) -> Tensor:
            return ((torch.arange(0, width, step, device=sides.device) + sides) // old).flatten()

        groups = index(size, self.group or columns + first)
        of_groups = (tensor[:, groups] for tensor in self._of_groups())
        of_runs = (tensor[:, index(run, self.run_columns)] for tensor in self._of_runs())
        changed = self.of([self.codes, *of_groups, *of_runs])
        factors = None if changed.factors is None else replace(changed.factors, run=run // size)
        return replace(changed, group=size, factors=factors)

    def tensors(self) -> list[Tensor]:
        """All tensors that have a row for each output, the codes first."""
        return [self.codes, *self._of_groups(), *self._of_runs()]

    def of(self, tensors: Iterable[Tensor]) -> Grouped:
        """The same form with other tensors, in the order of `tensors`."""
        given = iter(tensors)

        def instead(of: Tensor | None) -> Tensor | None:
            return None if of is None else next(given)

        codes, scales = next(given), next(given)
        offsets, minimums, factors = instead(self.offsets), instead(self.minimums), self.factors
        if factors is not None:
            factors = replace(factors, scales=next(given), minimums=instead(factors.minimums))
        return replace(self, codes=codes, scales=scales, offsets=offsets, minimums=minimums, factors=factors)

    def each(self, change: Callable[[Tensor], Tensor]) -> Grouped:
        """The same form with a change of each tensor that has a row for each output."""
        return self.of(map(change, self.tensors()))

    @property
    def zero_code(self) -> int:
        """The code that stands for 0 where there are no offsets."""
        return 0 if self.minimums is not None else 1 << (self.bits - 1)

    @property
    def run_columns(self) -> int:
        """The columns that share factors; without factors, 0."""
        return 0 if self.factors is None else self.group * self.factors.run

    def in_one_level(self) -> Grouped:
        """The same numbers without factors: float32 holds the products with small whole numbers exactly."""
        if self.factors is None:
            return self
        minimums = None if self.minimums is None else self._in_float32("minimums")
        return replace(self, scales=self._in_float32("scales"), minimums=minimums, factors=None)

    def in_bytes(self) -> Grouped:
        """The same numbers with codes of 8 bits."""
        counts = self.offsets is not None or self.minimums is not None
        codes = self.codes if counts else self.codes + ((1 << 7) - self.zero_code)
        return replace(self, codes=codes, bits=8)

    def widened(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain matrix [N, inputs], with its columns in the order of the inputs."""
        plain = self._numbers() * self._spread(self._in_float32("scales"))
        if self.minimums is not None:
            plain += self._spread(self._in_float32("minimums"))
        plain = plain.to(dtype or self.dtype)
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
        if levels := LEVELS.get(self.kind):
            return torch.tensor(levels, dtype=self.dtype, device=self.device).float()[self.codes.int()]
        zeros = self.zero_code if self.offsets is None else self._spread(self.offsets.float())
        return self.codes.float() - zeros

    def _in_float32(self, name: str) -> Tensor:
        """The scales or minimums [N, groups]."""
        numbers: Tensor = getattr(self, name).float()
        if self.factors is None:
            return numbers
        factors: Tensor = getattr(self.factors, name).float()
        return numbers * factors.repeat_interleave(self.factors.run, dim=1)[:, : numbers.shape[1]]

    def _spread(self, of_groups: Tensor) -> Tensor:
        columns = self.codes.shape[1]
        return of_groups.repeat_interleave(self.group or columns, dim=1)[:, :columns]

    def _of_groups(self) -> list[Tensor]:
        """The tensors that have a number for each group of a row."""
        return [tensor for tensor in (self.scales, self.offsets, self.minimums) if tensor is not None]

    def _of_runs(self) -> list[Tensor]:
        """The tensors that have a number for each run of groups of a row."""
        factors = self.factors
        found = () if factors is None else (factors.scales, factors.minimums)
        return [tensor for tensor in found if tensor is not None]


Matrix = Tensor | Grouped
"""What a layer reads from a checkpoint as its matrix [N, inputs]."""


def widen(matrix: Matrix) -> Tensor:
    return matrix.widened() if isinstance(matrix, Grouped) else matrix


def sorted_by_group(matrix: Grouped, group_of: Tensor) -> Grouped:
    """Lay columns whose groups `group_of` [K] names one group after the other.

    Groups that differ in length, as those of a piece of a matrix do, are filled up with columns of no input.
    """
    places = torch.arange(len(group_of), device=group_of.device)
    if group_of.is_meta:  # a model of which only the kernels are wanted: any order has the same
        return replace(matrix, order=places.int())
    if not matrix.group or torch.equal(group_of, places // matrix.group):
        return matrix
    matrix = matrix.in_one_level()
    order = group_of.argsort(stable=True)
    counts = torch.bincount(group_of, minlength=matrix.scales.shape[1])
    has_memory = not matrix.codes.is_meta
    if (counts[:-1] == matrix.group).all() and counts[-1] <= matrix.group:
        return replace(
            matrix, codes=matrix.codes[:, order] if has_memory else matrix.codes, order=order.int()
        )
    filled = -(-counts // _PADDED) * _PADDED
    shift = (filled - counts).cumsum(0) - (filled - counts)  # columns of no input ahead of each group
    places = places + shift[group_of[order]]
    total = int(filled.sum())
    codes = matrix.codes.new_zeros(len(matrix), total)
    if has_memory:
        codes[:, places] = matrix.codes[:, order]
    padded = torch.full((total,), -1, dtype=torch.int32, device=order.device)
    padded[places] = order.int()
    starts = torch.arange(len(counts), device=order.device).repeat_interleave(filled // _PADDED)
    of_groups = (tensor[:, starts] for tensor in matrix.tensors()[1:])
    return replace(matrix.of([codes, *of_groups]), group=_PADDED, order=padded)


def from_column(matrix: Grouped, start: int) -> Grouped:
    """Correct the groups of a piece that begins with the column `start` of the whole matrix.

    Its numbers of groups are those of all groups that it touches, or of whole runs if there are factors. One
    that is cut is divided further.
    """
    unit = matrix.run_columns or matrix.group
    shift = start % unit if unit else 0
    if not shift:
        return matrix
    return matrix.regrouped(gcd(matrix.group, shift), gcd(matrix.run_columns, shift), first=shift)


def with_input_bits(matrix: Matrix, bits: int | None) -> Matrix:
    """The same matrix, with inputs that may be rounded to so many bits; None: as it says itself.

    Codes that become floats, and plain matrices, are multiplied without rounding in any case.
    """
    if bits is None or not isinstance(matrix, Grouped) or matrix.kind in UNROUNDED:
        return matrix
    return replace(matrix, input_bits=bits)


def stacked(parts: Sequence[Matrix]) -> Matrix:
    """Join matrices row below row: into a grouped one if all have the same groups, else into a plain one."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, Grouped)]
    if len(grouped) < len(parts) or any(not alike(grouped[0], other) for other in grouped):
        return torch.cat([widen(part) for part in parts])
    if any(part.offsets is not None for part in grouped):
        grouped = [replace(part, offsets=_offsets(part)) for part in grouped]
    each = zip(*(part.tensors() for part in grouped), strict=True)
    joined = grouped[0].of(torch.cat(tensors) for tensors in each)
    return replace(joined, input_scale=_largest_scale(grouped))


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
    """Whether two matrices can be joined row below row.

    Orders without values count as equal, as those of matrices with the same inputs mostly are.
    """
    orders = [order for order in (one.order, other.order) if order is not None]
    same_order = len(orders) == 0 or (
        len(orders) == 2 and (orders[0].is_meta or orders[0] is orders[1] or torch.equal(*orders))
    )
    return same_order and _form(one) == _form(other)


def _form(matrix: Grouped) -> tuple[object, ...]:
    """All that is the same in matrices that can be joined, but for their orders."""
    factors, has_minimums = matrix.factors, matrix.minimums is not None
    levels = () if factors is None else (factors.run, factors.scales.dtype)
    numbers = (matrix.bits, matrix.group, matrix.dtype, matrix.input_bits, matrix.kind)
    return *numbers, matrix.scales.dtype, has_minimums, *levels


def _largest_scale(parts: Sequence[Grouped]) -> float | None:
    """The scale of inputs that none of these parts has a larger one than; None if any has none."""
    scales = [part.input_scale for part in parts]
    found = [scale for scale in scales if scale is not None]
    return max(found) if len(found) == len(scales) else None


def _zeros(tensor: Tensor, count: int) -> Tensor:
    """As many rows of bytes 0 as `count`, of the type and width of a tensor."""
    zeros = torch.zeros(count, tensor.shape[1] * tensor.itemsize, dtype=torch.uint8, device=tensor.device)
    return zeros.view(tensor.dtype)


def _offsets(matrix: Grouped) -> Tensor:
    if matrix.offsets is not None:
        return matrix.offsets
    return torch.full_like(matrix.scales, matrix.zero_code, dtype=torch.uint8)
