"""Compares the kernels with the reference when they are loaded: once, with small tensors, on this machine.

Compilers and virtual machines have been wrong before, and a slow answer is better than a false one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.context import ForwardContext
from models.ops import reference
from models.ops.head_prep import HeadPrep
from models.quantization.coding import E4M3
from models.quantization.matrix import Grouped

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def wrong(
    table: Mapping[str, Callable[..., Any]], specified: Mapping[str, Callable[..., Any]] = vars(reference)
) -> list[str]:
    """The names of operations whose results differ from those in `specified`, as far as they are there."""
    made = torch.Generator().manual_seed(0)
    found = set[str]()
    for dtype, tolerance in _TOLERANCE.items():
        for case in _cases(made, dtype):
            if case.name not in specified:
                continue
            if not _near(case.compute(table), case.compute(specified), tolerance):
                found.add(case.name)
    return sorted(found)


@dataclass(frozen=True)
class _Case:
    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    sections: int | None = None

    def compute(self, table: Mapping[str, Callable[..., Any]]) -> Any:
        arguments = [x.clone() if isinstance(x, Tensor) else x for x in self.arguments]
        if "linear" in self.name:
            arguments[1] = table["pack"](
                arguments[1], gated=self.name == "gated_linear", sections=self.sections
            )
        result = table[self.name](*arguments, **self.options)
        return (result, arguments[3]) if self.name == "rotary_and_cache" else result  # with the cache


def _cases(made: torch.Generator, dtype: torch.dtype) -> list[_Case]:
    """Calls of every operation, with sizes that are no multiples of a vector or a tile."""

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    x, residual, weight, bias = values(5, 67), values(5, 67), values(67), values(67)
    q, k, v, kv = values(10, 6, 40), values(10, 2, 40), values(10, 2, 40), values(2, 9, 2, 4, 40)
    cos_sin, step = values(10, 40).float(), _step()
    products = [
        _Case(name, (values(rows, 67), values(102, 67), values(102), *kind))
        for rows in (1, 4, 29)
        for name, kind in (("linear", ()), ("gated_linear", ("silu",)), ("gated_linear", ("gelu",)))
    ]
    return [
        *products,
        _Case("linear", (values(13, 80), values(102, 80), values(102)), sections=8),
        *_quantized_cases(made, dtype),
        _Case("rms_norm", (x, weight, 1e-5)),
        _Case("add_rms_norm", (x, residual, weight, 1e-5)),
        _Case("sum_squares", (x, 1)),
        _Case("sum_squares", (values(5, 72), 8)),
        _Case("spread_rms_norm", (x, weight, values(5, 1).float().square() * 67, 67, 1e-5)),
        _Case("layer_norm", (x, weight, bias, 1e-5)),
        _Case("add_layer_norm", (x, residual, weight, bias, 1e-5)),
        _Case("add", (x, bias)),
        _Case("scale", (x, 0.37)),
        _Case("embed", (torch.tensor([4, 0, 3]), x)),
        _Case("angles", (step.positions, values(33).float(), 0.5)),
        _Case("activation", (x, "gelu_tanh")),
        _Case("gated", (values(5, 70), "relu")),
        _Case("rotary_and_cache", (q, k, v, kv, step, HeadPrep(cos_sin))),
        _Case("attention", (q, kv, step), {"scale": 0.2}),
        _Case("attention", (q, kv, step), {"scale": 0.2, "window": 3}),
        _Case("encoder_attention", (q, k, v, step), {"scale": 0.2}),
        _Case("mean", (x,)),
        _Case("normalize", (x.float(),)),
    ]


def _quantized_cases(made: torch.Generator, dtype: torch.dtype) -> list[_Case]:
    """Products with matrices that a checkpoint holds quantized: whole numbers of 4 and 8 bits, and e4m3."""
    forms = (
        (1, 2, _grouped(made, dtype, 4, False)),
        (7, 1, _grouped(made, dtype, 4, True)),
        (3, 1, _grouped(made, dtype, 8, False)),
        (1, 1, _grouped(made, dtype, 8, True)),
        (1, 2, _e4m3(made, dtype)),
        (13, 2, _e4m3(made, dtype)),
    )
    return [
        _Case("linear", (torch.randn(rows, 80, generator=made).to(dtype), matrix), sections=sections)
        for rows, sections, matrix in forms
    ]


def _e4m3(made: torch.Generator, dtype: torch.dtype) -> Grouped:
    """A matrix [102, 80] of numbers of 8 bits, of all sizes."""
    codes = torch.randint(127, (102, 80), generator=made) + 128 * torch.randint(2, (102, 80), generator=made)
    scales = torch.rand(102, 3, generator=made) / 128
    return Grouped(codes.to(torch.uint8), 8, 32, scales, None, 80, dtype, kind=E4M3)


def _grouped(made: torch.Generator, dtype: torch.dtype, bits: int, others: bool) -> Grouped:
    """A quantized matrix [102, 80]; with `others`, zero points and an order of its inputs as well."""

    def codes(groups: int) -> Tensor:
        return torch.randint(1 << bits, (102, groups), generator=made, dtype=torch.uint8)

    return Grouped(
        codes=codes(80),
        bits=bits,
        group=32,
        scales=(torch.rand(102, 3, generator=made) / (1 << bits)).half(),
        offsets=codes(3) if others else None,
        inputs=80,
        dtype=dtype,
        order=torch.randperm(80, generator=made).int() if others else None,
    )


def _step() -> ForwardContext:
    """A step with a whole prompt, the next chunk of a prompt, and a sequence that decodes."""
    new, total = [5, 4, 1], [5, 13, 6]
    blocks = torch.tensor([[8, 4, 0, 0], [3, 1, 7, 2], [6, 5, 0, 0]], dtype=torch.int32)
    positions = [torch.arange(stop - count, stop) for count, stop in zip(new, total, strict=True)]
    slots = [row[at // 4].long() * 4 + at % 4 for row, at in zip(blocks, positions, strict=True)]
    return ForwardContext(
        positions=torch.cat(positions),
        query_starts=torch.tensor([0, 5, 9, 10], dtype=torch.int32),
        kv_lens=torch.tensor(total, dtype=torch.int32),
        block_table=blocks,
        slot_mapping=torch.cat(slots),
        block_size=4,
        query_lens_host=new,
        kv_lens_host=total,
    )


def _near(result: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, tuple):
        return all(_near(*pair, tolerance) for pair in zip(result, expected, strict=True))
    return torch.allclose(result.float(), expected.float(), rtol=tolerance, atol=tolerance * 5)
