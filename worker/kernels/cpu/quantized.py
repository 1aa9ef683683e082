"""Quantized linear layers in plain torch: how matrices are quantized, and the operations that read them.

The operations here are the specification of `csrc/quantized.h`, which computes with exactly the numbers that
`quantize` makes, or that a checkpoint holds. They replace it on processors, systems and number types that the
C kernels do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.parallel.tree import add_in_pairs
from models.quantization.coding import E4M3, WHOLE
from models.quantization.matrix import Grouped, Matrix, stacked
from worker.kernels.cpu import portable


@dataclass(frozen=True, slots=True)
class Scheme:
    """The numbers of a way to quantize."""

    bits: int
    """Bits of an element of the matrix."""
    group: int
    """Inputs of a row that share a scale, in the matrix and in the rows that it is multiplied with."""
    input_bits: int
    """Bits to which inputs are rounded. 16 lose nothing that could be measured; 8 take half the time in large
    batches."""
    largest: tuple[float, ...]
    """Whole numbers that the largest element of a group may become, with the other sign: the best is taken.

    There is one more negative number than positive ones, and finer steps may be worth cutting a few elements.
    Matrices that are quantized already have none.
    """


SCHEMES: Mapping[str, Scheme] = {
    "int8": Scheme(bits=8, group=128, input_bits=16, largest=(127,)),
    "int8-dynamic": Scheme(bits=8, group=128, input_bits=8, largest=(127,)),
    "int4": Scheme(bits=4, group=32, input_bits=8, largest=(7.5, 8.25, 9)),
}

HEAD = SCHEMES["int8"]
"""The scheme of matrices with float32 results, in every mode: LM heads decide between near neighbours."""

_ELEMENTS = 1 << 20
"""Elements converted at a time: more would not stay in the caches."""


def find_scheme(name: str) -> Scheme:
    if name not in SCHEMES:
        raise ValueError(f"unknown --quantization {name!r}: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]


def quantize(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """[N, K] -> whole numbers [N, K] int8, and the scale of each group [N, groups] bfloat16."""
    outputs, inputs = weight.shape
    values = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs, -(-inputs // scheme.group), dtype=torch.bfloat16)
    for rows in _slices(outputs, inputs):
        groups = _in_groups(weight[rows], scheme)  # [n, groups, group]
        whole, scale = _nearest([_rounded(groups, largest, scheme) for largest in scheme.largest], groups)
        values[rows] = whole.flatten(1)[:, :inputs]
        scales[rows] = scale.squeeze(-1)
    return values, scales


def widen(values: Tensor, scales: Tensor, scheme: Scheme, zeros: Tensor | None = None) -> Tensor:
    """Whole numbers [N, K] and the scales of their groups as a float32 matrix [N, K].

    `zeros` [N, groups] uint8 are the codes that stand for 0, where it is not the middle one of each group.
    """
    groups = _in_groups(values, scheme)
    if zeros is not None:
        groups = groups - (zeros.float() - (1 << (scheme.bits - 1))).unsqueeze(-1)
    return (groups * scales.float().unsqueeze(-1)).flatten(1)[:, : values.shape[1]]


def round_inputs(x: Tensor, scheme: Scheme) -> Tensor:
    """[T, K] -> float32 [T, K], each group rounded on a scale of its own."""
    most = torch.tensor(127.0 if scheme.input_bits == 8 else 32639.0)
    groups = _in_groups(x, scheme)  # [T, groups, group]
    top = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    whole = (groups * (most / top)).round_()
    return (whole * (top / most)).flatten(1)[:, : x.shape[1]]


class Quantized(nn.Parameter):
    """A matrix of bytes: in each row its numbers (of 4 bits, two in a byte), its scales, and zeros if any.

    The sections of a matrix with several lie one below the other.
    """

    scheme: Scheme
    inputs: int
    """The inputs of a section."""
    sections: int
    bytes_before: int
    scale_type: torch.dtype
    has_zeros: bool
    order: Tensor | None
    """The order of the inputs, as `Grouped` has it."""
    kind: str
    """What codes mean, as `Grouped` has it."""

    @classmethod
    def of(cls, weight: Tensor, scheme: Scheme, sections: int = 1) -> Quantized:
        """Quantize a plain matrix."""
        values, scales = quantize(torch.cat(weight.chunk(sections, dim=1)), scheme)
        return cls._made(values, scales, None, scheme, sections, weight.nbytes)

    @classmethod
    def kept(cls, matrix: Grouped, sections: int | None = None) -> Quantized:
        """Keep the numbers of a matrix that is quantized already. One with an order has no sections."""
        matrix = matrix.in_groups(sections if matrix.order is None else None)
        sections = 1 if matrix.order is not None else sections or 1
        if matrix.kind == E4M3:
            values = matrix.codes.contiguous().view(torch.int8)
        else:
            values = (matrix.codes.short() - (1 << (matrix.bits - 1))).to(torch.int8)
        offsets = None if matrix.offsets is None else torch.cat(matrix.offsets.chunk(sections, dim=1))
        values, scales = (torch.cat(x.chunk(sections, dim=1)) for x in (values, matrix.scales))
        scheme = Scheme(matrix.bits, matrix.group, matrix.input_bits, ())
        made = cls._made(values, scales, offsets, scheme, sections, matrix.plain_bytes)
        made.order, made.kind = matrix.order, matrix.kind
        return made

    @classmethod
    def _made(
        cls,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        scheme: Scheme,
        sections: int,
        bytes_before: int,
    ) -> Quantized:
        inputs = values.shape[1]
        if scheme.bits == 4:
            low, high = F.pad(values, (0, inputs % 2)).unflatten(1, (-1, 2)).unbind(-1)
            values = low & 15 | high << 4
        columns = [values, scales.contiguous().view(torch.int8)]
        columns += [] if zeros is None else [zeros.contiguous().view(torch.int8)]
        packed = cls(torch.cat(columns, dim=1), requires_grad=False)
        packed.scheme, packed.inputs, packed.sections = scheme, inputs, sections
        packed.scale_type, packed.has_zeros = scales.dtype, zeros is not None
        packed.bytes_before, packed.order, packed.kind = bytes_before, None, WHOLE
        return packed

    def parts(self, section: int) -> Iterator[Tensor]:
        """A section of the matrix in float32, some rows at a time."""
        groups = -(-self.inputs // self.scheme.group)
        sizes = [self.scale_type.itemsize * groups, groups if self.has_zeros else 0]
        data = self.data.chunk(self.sections)[section]
        for rows in _slices(len(data), self.inputs):
            piece = data[rows]
            values, scales, zeros = piece.split([piece.shape[1] - sum(sizes), *sizes], dim=1)
            if self.scheme.bits == 4:
                values = torch.stack([values << 4 >> 4, values >> 4], dim=-1).flatten(1)[:, : self.inputs]
            if self.kind == E4M3:
                values = values.contiguous().view(torch.float8_e4m3fn)
            scales = scales.clone(memory_format=torch.contiguous_format).view(self.scale_type)
            of_zero = zeros.contiguous().view(torch.uint8) if self.has_zeros else None
            yield widen(values, scales, self.scheme, of_zero)


def table(scheme: Scheme | None) -> Mapping[str, Callable[..., Any]]:
    """The operations of linear layers for `models.ops.use`. `scheme`: how `pack` quantizes plain matrices."""

    def pack(*parts: Matrix, gated: bool = False, wide: bool = False, sections: int | None = None) -> Tensor:
        matrix = stacked(parts)
        if isinstance(matrix, Grouped):
            return Quantized.kept(matrix, sections)
        if scheme is None:
            return portable.pack(matrix, sections=sections)
        return Quantized.of(matrix, HEAD if wide else scheme, sections or 1)

    return {"pack": pack, "linear": linear, "gated_linear": gated_linear}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, kind: str | None = None, wide: bool = False
) -> Tensor:
    if type(weight) is not Quantized:
        return portable.linear(x, weight, bias, kind=kind, wide=wide)
    out = _multiply(x, weight, bias)
    out = portable.activation(out, kind) if kind else out
    return out if wide else out.to(x.dtype)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    if type(weight) is not Quantized:
        return portable.gated_linear(x, weight, bias, kind)
    return portable.gated(_multiply(x, weight, bias), kind).to(x.dtype)


def describe_savings(name: str, parameters: Iterable[Tensor]) -> str:
    """The size of all weights now and before, for the log. Raises ValueError if none is quantized."""
    before, after, found = 0, 0, False
    for parameter in parameters:
        bytes_before = getattr(parameter, "bytes_before", None)
        found = found or bytes_before is not None
        before += parameter.nbytes if bytes_before is None else bytes_before
        after += parameter.nbytes
    if not found:
        raise ValueError(
            f"--quantization {name} is for the linear layers of our own model code, and this model runs on "
            "that of transformers: leave the option out"
        )
    return f"quantization {name}: {before / 2**20:.0f} MiB of weights became {after / 2**20:.0f} MiB"


def _multiply(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """The product of inputs and a matrix, in float32."""
    if weight.order is not None:
        x = F.pad(x, (0, 1))[:, weight.order.long()]  # the place -1 is the zero behind the last input
    pieces = x.float().chunk(weight.sections, dim=1)
    if weight.kind == WHOLE:
        pieces = [round_inputs(piece, weight.scheme) for piece in pieces]
    out = add_in_pairs(
        [
            torch.cat([portable.linear(piece, part) for part in weight.parts(section)], dim=-1)
            for section, piece in enumerate(pieces)
        ]
    )
    return out if bias is None else out + bias.float()


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
