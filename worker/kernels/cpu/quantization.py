"""Quantizes matrices when they are loaded, and has a form of them that plain torch can read.

`csrc/tile_quantized.c` computes with exactly the numbers that `quantize` makes, or that a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.ops.grouped_matrix import Grouped
from models.weight_coding import WHOLE


@dataclass(frozen=True, slots=True)
class Scheme:
    """The numbers of a way to quantize."""

    bits: int
    """Bits of an element of the matrix."""
    group: int
    """Inputs that share a scale in the rows that the matrix is multiplied with, and where it is made here, in
    its own rows."""
    input_bits: int
    """Bits to which inputs are rounded. 16 lose nothing that could be measured; 8 take half the time in large
    batches."""
    largest: tuple[float, ...]
    """Numbers that the largest element of a group may become, with the other sign: the best is taken. Finer
    steps may be worth cutting a few elements. Matrices that are quantized already have none."""
    shifts: bool = False
    """Whether scales of inputs are powers of 2 of the largest one of their run."""


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme(bits=8, group=128, input_bits=16, largest=(127,)),
    "int8-dynamic": Scheme(bits=8, group=128, input_bits=8, largest=(127,)),
    "int4": Scheme(bits=4, group=32, input_bits=8, largest=(7.5, 8.25, 9)),
}

HEAD = SCHEMES["int8"]
"""The scheme of matrices with float32 results, in every mode: LM heads decide between near neighbours."""

UNITS = {5: 32, 6: 16}
"""Codes of so many bits lie in units of so many inputs: `csrc/weights.h`."""

_MOST_ROUNDED = 256
"""Inputs that are rounded together, at most: `CHUNK` in `csrc/chunk.h`."""

_LARGE_GROUP = 128
"""Groups of so many inputs have scales of any size: `has_shifts` in `csrc/quantized_rows.h`."""

_MOST_SHIFT = 7
"""The least scale of a run is its largest one times 2 to the power of minus this."""

_ELEMENTS = 1 << 20
"""Elements converted at a time: more would not stay in the caches."""


def find_scheme(name: str) -> Scheme:
    if name not in SCHEMES:
        raise ValueError(f"unknown --quantization {name!r}: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def quantize(weight: Tensor, scheme: Scheme) -> Grouped:
    """Quantize a plain matrix [N, K]; its scales become bfloat16."""
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, -(-inputs // scheme.group), dtype=torch.bfloat16)
    for rows in _slices(outputs, inputs):
        groups = _in_groups(weight[rows], scheme)  # [n, groups, group]
        whole, scale = _nearest([_rounded(groups, largest, scheme) for largest in scheme.largest], groups)
        codes[rows] = (whole + (1 << (scheme.bits - 1))).flatten(1)[:, :inputs]
        scales[rows] = scale.squeeze(-1)
    bits, group, rounded = scheme.bits, scheme.group, scheme.input_bits
    return Grouped(codes, bits, group, scales, None, inputs, weight.dtype, input_bits=rounded)


def round_inputs(x: Tensor, scheme: Scheme) -> Tensor:
    """[T, K] -> float32 [T, K], each group rounded on a scale of its own, or on one that others share."""
    most = torch.tensor(127.0 if scheme.input_bits == 8 else 32639.0)
    groups = _in_groups(x, scheme)  # [T, groups, group]
    top = groups.abs().amax(-1, keepdim=True)
    factor = torch.ones_like(top)
    if scheme.shifts:
        largest = _largest_of_run(top, _MOST_ROUNDED // scheme.group)
        doublings = (largest.view(torch.int32) - top.view(torch.int32)) >> 23
        factor, top = torch.exp2(doublings.clamp_max(_MOST_SHIFT)), largest
    top = top.clamp_min(1e-30)
    whole = (groups * (most / top * factor)).round_()
    return (whole * (top / most / factor)).flatten(1)[:, : x.shape[1]]


def _largest_of_run(top: Tensor, run: int) -> Tensor:
    """[T, groups, 1] -> the same shape, the largest one of so many neighbours."""
    runs = F.pad(top, (0, 0, 0, -top.shape[1] % run)).unflatten(1, (-1, run))
    return runs.amax(2).repeat_interleave(run, 1)[:, : top.shape[1]].contiguous()


class Quantized(nn.Parameter):
    """A matrix of bytes: in each row its codes (of 4 bits, two in a byte), and the numbers of its groups. The
    sections of a matrix with several lie one below the other."""

    form: Grouped
    """The form of the sections, whose tensors have no rows."""
    sections: int
    bytes_before: int
    order: Tensor | None
    """The order of the inputs, as `Grouped` has it."""

    @classmethod
    def of(cls, weight: Tensor, scheme: Scheme, sections: int = 1) -> Quantized:
        """Quantize a plain matrix."""
        return cls._made(quantize(torch.cat(weight.chunk(sections, dim=1)), scheme), sections, weight.nbytes)

    @classmethod
    def kept(cls, matrix: Grouped, sections: int | None = None) -> Quantized:
        """Keep the numbers of a matrix that is quantized already. One with an order has no sections."""
        sections = sections if matrix.order is None else None
        whole = matrix.in_groups(sections)
        below = whole.each(lambda tensor: torch.cat(tensor.chunk(sections or 1, dim=1)))
        return cls._made(below, sections or 1, matrix.plain_bytes)

    @classmethod
    def _made(cls, matrix: Grouped, sections: int, bytes_before: int) -> Quantized:
        codes = matrix.codes
        if matrix.bits == 4:
            low, high = F.pad(codes, (0, codes.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(-1)
            codes = low | high << 4
        columns = [tensor.contiguous().view(torch.uint8) for tensor in (codes, *matrix.tensors()[1:])]
        packed = cls(torch.cat(columns, dim=1), requires_grad=False)
        packed.form, packed.sections = replace(matrix.each(lambda tensor: tensor[:0]), order=None), sections
        packed.bytes_before, packed.order = bytes_before, matrix.order
        return packed

    @property
    def scheme(self) -> Scheme:
        form, whole = self.form, _has_whole_scales(self.form)
        large = form.group >= _LARGE_GROUP and form.kind == WHOLE and form.bits == 4
        small = form.bits < 8 and _fills_units(form) and not large
        shifts = small and form.input_bits == 8 and not whole
        return Scheme(form.bits, form.run_columns if whole else form.group, form.input_bits, (), shifts)

    def parts(self, section: int) -> Iterator[Tensor]:
        """A section of the matrix in float32, some rows at a time."""
        data = self.data.chunk(self.sections)[section]
        for rows in _slices(len(data), self.form.codes.shape[1]):
            yield self.widened(data[rows])

    def widened(self, rows: Tensor) -> Tensor:
        """Widen rows of a section, given as their bytes, to float32."""
        inputs = self.form.codes.shape[1]
        widths = [tensor.shape[1] * tensor.itemsize for tensor in self.form.tensors()[1:]]
        codes, *numbers = rows.split([rows.shape[1] - sum(widths), *widths], dim=1)
        if self.form.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)[:, :inputs]
        pairs = zip([codes, *numbers], self.form.tensors(), strict=True)
        typed = (stored.clone(memory_format=torch.contiguous_format).view(of.dtype) for stored, of in pairs)
        return self.form.of(typed).widened(torch.float32)


def describe_savings(name: str, parameters: Iterable[Tensor]) -> str:
    """The size of all weights now and before, for the log. Raises ValueError if none is quantized."""
    sizes = [(getattr(parameter, "bytes_before", None), parameter.nbytes) for parameter in parameters]
    before, after = sum(before or now for before, now in sizes), sum(now for _, now in sizes)
    if all(before is None for before, _ in sizes):
        raise ValueError(
            f"--quantization {name} is for the linear layers of our own model code, and this model runs on "
            "that of transformers: leave the option out"
        )
    return f"quantization {name}: {before / 2**20:.0f} MiB of weights became {after / 2**20:.0f} MiB"


def _has_whole_scales(form: Grouped) -> bool:
    """Whether kernels multiply sums with scales while both are whole numbers.

    Then inputs are rounded run by run.
    """
    small = form.bits < 8 and form.input_bits == 8 and form.kind == WHOLE and form.offsets is None
    fills = _fills_units(form) and 0 < form.run_columns <= _MOST_ROUNDED
    return small and fills and form.scales.dtype in (torch.uint8, torch.int8)


def _fills_units(form: Grouped) -> bool:
    """Whether codes of 5 and 6 bits stay so. Others become bytes, whose groups are rounded one by one."""
    return form.group % UNITS.get(form.bits, 1) == 0


def _slices(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _ELEMENTS // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def _in_groups(x: Tensor, scheme: Scheme) -> Tensor:
    """[N, K] -> [N, groups, group] float32; the last group is filled with zeros."""
    return F.pad(x.float(), (0, -x.shape[1] % scheme.group)).unflatten(1, (-1, scheme.group))


def _rounded(groups: Tensor, largest: float, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Round groups to whole numbers [n, groups, group] float32 with scales [n, groups, 1] bfloat16."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (torch.where(high > -low, high, low) / -largest).bfloat16()
    half = 1 << (scheme.bits - 1)
    return (groups / torch.where(scale == 0, 1, scale)).round_().clamp_(-half, half - 1), scale


def _nearest(candidates: list[tuple[Tensor, Tensor]], groups: Tensor) -> tuple[Tensor, Tensor]:
    """Take the candidate with the least error for each group."""
    if len(candidates) == 1:
        return candidates[0]
    errors = torch.cat(
        [(whole * scale - groups).square_().sum(-1, keepdim=True) for whole, scale in candidates], dim=-1
    )
    best = errors.argmin(-1, keepdim=True)  # [n, groups, 1]
    (whole, scale), *others = candidates
    for i, (other, other_scale) in enumerate(others, start=1):
        whole, scale = torch.where(best == i, other, whole), torch.where(best == i, other_scale, scale)
    return whole, scale
