"""Quantized linear layers in plain torch: how matrices are quantized, and the operations that read them.

The operations here are the specification of `csrc/quantized.h`, which computes with exactly the numbers that
`quantize` makes. They replace it on processors, systems and number types that the C kernels do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.ops import reference
from models.parallel.tree import add_in_pairs
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


def widen(values: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """The results of `quantize` as a float32 matrix [N, K]."""
    groups = _in_groups(values, scheme) * scales.float().unsqueeze(-1)
    return groups.flatten(1)[:, : values.shape[1]]


def round_inputs(x: Tensor, scheme: Scheme) -> Tensor:
    """[T, K] -> float32 [T, K], each group rounded on a scale of its own."""
    most = torch.tensor(127.0 if scheme.input_bits == 8 else 32639.0)
    groups = _in_groups(x, scheme)  # [T, groups, group]
    top = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    whole = (groups * (most / top)).round_()
    return (whole * (top / most)).flatten(1)[:, : x.shape[1]]


class Quantized(nn.Parameter):
    """A matrix of bytes: in each row its numbers (of 4 bits, two in a byte), then its scales.

    The sections of a matrix with several lie one below the other.
    """

    scheme: Scheme
    inputs: int
    """The inputs of a section."""
    sections: int
    bytes_before: int

    @classmethod
    def of(cls, weight: Tensor, scheme: Scheme, sections: int = 1) -> Quantized:
        nbytes, weight = weight.nbytes, torch.cat(weight.chunk(sections, dim=1))
        values, scales = quantize(weight, scheme)
        if scheme.bits == 4:
            low, high = F.pad(values, (0, values.shape[1] % 2)).unflatten(1, (-1, 2)).unbind(-1)
            values = low & 15 | high << 4
        packed = cls(torch.cat([values, scales.view(torch.int8)], dim=1), requires_grad=False)
        packed.scheme, packed.inputs, packed.sections = scheme, weight.shape[1], sections
        packed.bytes_before = nbytes
        return packed

    def parts(self, section: int) -> Iterator[Tensor]:
        """A section of the matrix in float32, some rows at a time."""
        scale_bytes = 2 * -(-self.inputs // self.scheme.group)
        data = self.data.chunk(self.sections)[section]
        for rows in _slices(len(data), self.inputs):
            values, scales = data[rows].tensor_split([-scale_bytes], dim=1)
            if self.scheme.bits == 4:
                values = torch.stack([values << 4 >> 4, values >> 4], dim=-1).flatten(1)[:, : self.inputs]
            scales = scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
            yield widen(values, scales, self.scheme)


def table(scheme: Scheme) -> Mapping[str, Callable[..., Any]]:
    """The operations of linear layers whose matrices are quantized by `pack`, for `models.ops.use`."""

    def pack(*parts: Tensor, gated: bool = False, wide: bool = False, sections: int | None = None) -> Tensor:
        return Quantized.of(reference.pack(*parts), HEAD if wide else scheme, sections or 1)

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
    pieces = [round_inputs(piece, weight.scheme) for piece in x.chunk(weight.sections, dim=1)]
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
