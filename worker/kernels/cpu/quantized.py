"""Quantized linear layers in plain torch: how matrices are quantized, and the operations that read them.

The operations here are the specification of `csrc/tile_quantized.c`, which computes with exactly the numbers
that `quantize` makes, or that a checkpoint holds. They replace it on processors, systems and number types
that the C kernels do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.ops import reference
from models.ops.grouped_matrix import Grouped, Matrix, stacked, widen
from models.ops.tree_sum import add_in_pairs
from models.weight_coding import E4M3
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
    return Grouped(
        codes=codes,
        bits=scheme.bits,
        group=scheme.group,
        scales=scales,
        offsets=None,
        inputs=inputs,
        dtype=weight.dtype,
        input_bits=scheme.input_bits,
    )


def round_inputs(x: Tensor, scheme: Scheme) -> Tensor:
    """[T, K] -> float32 [T, K], each group rounded on a scale of its own."""
    most = torch.tensor(127.0 if scheme.input_bits == 8 else 32639.0)
    groups = _in_groups(x, scheme)  # [T, groups, group]
    top = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    whole = (groups * (most / top)).round_()
    return (whole * (top / most)).flatten(1)[:, : x.shape[1]]


class Quantized(nn.Parameter):
    """A matrix of bytes: in each row its codes (of 4 bits, two in a byte), and the numbers of its groups.

    The sections of a matrix with several lie one below the other.
    """

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
        return Scheme(self.form.bits, self.form.group, self.form.input_bits, ())

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
        return self.form.of(_of_type(stored, like.dtype) for stored, like in pairs).widened(torch.float32)


def _of_type(stored: Tensor, dtype: torch.dtype) -> Tensor:
    return stored.clone(memory_format=torch.contiguous_format).view(dtype)


def table(scheme: Scheme | None) -> Mapping[str, Callable[..., Any]]:
    """The operations of linear layers for `models.ops.use`.

    `scheme`: how `pack` quantizes all matrices; None keeps each as it is.
    """

    def pack(
        *parts: Matrix,
        gated: bool = False,
        wide: bool = False,
        sections: int | None = None,
        plain: bool = False,
    ) -> Tensor:
        matrix = stacked(parts)
        if scheme is not None and not plain:
            return Quantized.of(widen(matrix), HEAD if wide else scheme, sections or 1)
        if isinstance(matrix, Grouped):
            return Quantized.kept(matrix, sections)
        return portable.pack(matrix, sections=sections)

    experts = portable.experts_by(gated_linear, linear)
    return {"pack": pack, "linear": linear, "gated_linear": gated_linear, "embed": embed, "experts": experts}


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    if type(weight) is not Quantized:
        return reference.embed(ids, weight)
    return weight.widened(weight.data[ids]).to(weight.form.dtype)


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
    if weight.form.kind != E4M3:
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
