"""The figures of `make gpu-check` for quantized matrices, experts and a cache of 8 bits.

A product of few rows cannot take less time than it takes to read its matrix; experts, those that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from measures import Ceilings, Result, seconds_of
from paged import make_cache, make_step
from torch import Tensor, nn

from models.quantization.coding import E4M3, WHOLE
from models.quantization.matrix import Grouped
from worker.kernels import check

Operations = Mapping[str, Any]
BF16 = torch.bfloat16
FORMS = {"4 bits, groups of 128": (4, 128, WHOLE), "4 bits, groups of 32": (4, 32, WHOLE)} | {
    "8 bits, groups of 128": (8, 128, WHOLE),
    "e4m3, groups of 128": (8, 128, E4M3),
}
EXPERTS, CHOSEN = 64, 8
ROUNDED = 0.04
"""How far results may be from those whose inputs were not rounded, relative to their size."""


def grouped(bits: int, group: int, kind: str, outputs: int, inputs: int, target: torch.device) -> Grouped:
    codes = torch.randint(1 << (bits - 1), (outputs, inputs), device=target, dtype=torch.uint8)
    scales = torch.rand(outputs, -(-inputs // group), device=target).half() / (1 << bits)
    return Grouped(codes, bits, group, scales, None, inputs, BF16, kind=kind)


def measure_products(
    operations: Operations, target: torch.device, ceilings: Ceilings, side: int = 8192
) -> Iterator[Result]:
    """Square matrices in each form, beside a plain one."""
    plain = operations["pack"](torch.randn(side, side, device=target).to(BF16))
    matrices: dict[str, Tensor] = {"bfloat16": plain}
    for name, (bits, group, kind) in FORMS.items():
        matrices[name] = operations["pack"](grouped(bits, group, kind, side, side, target))
    for rows in (1, 16, 64, 512):
        x = torch.randn(rows, side, device=target).to(BF16)
        for name, matrix in matrices.items():
            took = seconds_of(lambda x=x, matrix=matrix: operations["linear"](x, matrix), target)
            floor = max(
                matrix.nbytes / ceilings.bytes_per_second,
                2 * rows * side**2 / ceilings.operations_per_second,
            )
            yield Result(f"product, {name}, {rows} rows", "", took * 1e6, "us", floor / took)


Multiply = Callable[[Tensor, Tensor], Tensor]


def measure_rounding(
    pack: Callable[[Grouped], Tensor],
    ways: Mapping[str, Multiply],
    target: torch.device,
    ceilings: Ceilings,
    side: int = 8192,
    counts: tuple[int, ...] = (1, 16, 64, 256, 2048),
) -> Iterator[Result]:
    """Products in e4m3 whose inputs keep their bits, beside those that round them, which come after it."""
    for form, group in (("rows", 0), ("blocks of 128", 128)):
        matrix = pack(small_floats(side, group, target))
        for rows in counts:
            x = torch.randn(rows, side, device=target).to(BF16)
            kept: Tensor | None = None
            for way, multiply in ways.items():
                out = multiply(x, matrix).float()
                kept = out if kept is None else kept
                apart = ((out - kept).norm() / kept.norm()).item()
                took = seconds_of(lambda x=x, matrix=matrix, multiply=multiply: multiply(x, matrix), target)
                operations = 2 * rows * side**2 / ceilings.operations_per_second
                floor = max(matrix.nbytes / ceilings.bytes_per_second, operations)
                said = f"differs by {apart:.1%}" if apart else ""
                wrong = int(not apart < ROUNDED)
                name = f"e4m3, {form}, {way}, {rows} rows"
                yield Result(name, said, took * 1e6, "us", floor / took, wrong)


def small_floats(side: int, group: int, target: torch.device) -> Grouped:
    """A square matrix in e4m3 whose inputs may be rounded, with a scale for each row, or block of 128."""
    codes = torch.randn(side, side, device=target).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(side, -(-side // group) if group else 1, device=target) + 0.5
    if group:
        scales = scales[::group].repeat_interleave(group, 0)[:side]
    return Grouped(codes, 8, group, scales, None, side, BF16, input_bits=8, kind=E4M3)


def measure_experts(
    operations: Operations,
    target: torch.device,
    ceilings: Ceilings,
    size: int = 2048,
    inner: int = 768,
    counts: tuple[int, ...] = (1, 16, 1024),
) -> Iterator[Result]:
    """A layer of experts, plain and with 4 bits."""
    for name, bits in (("bfloat16", 16), ("4 bits", 4)):
        shapes = ((2 * inner, size), (size, inner))
        gate_up, down = (
            operations["collect_experts"]([_expert(operations, bits, *shape, target) for _ in range(EXPERTS)])
            for shape in shapes
        )
        for tokens in counts:
            x = torch.randn(tokens, size, device=target).to(BF16)
            ids = torch.stack([torch.randperm(EXPERTS)[:CHOSEN].sort().values for _ in range(tokens)])
            ids, weights = ids.int().to(target), torch.rand(tokens, CHOSEN, device=target)
            took = seconds_of(
                lambda x=x, ids=ids, weights=weights, gate_up=gate_up, down=down: operations["experts"](
                    x, ids, weights, gate_up, down, "silu"
                ),
                target,
            )
            read = len(ids.unique()) * (gate_up[0].nbytes + down[0].nbytes)
            computed = 6 * tokens * CHOSEN * size * inner
            floor = max(read / ceilings.bytes_per_second, computed / ceilings.operations_per_second)
            yield Result(f"experts, {name}, {tokens} tokens", "", took * 1e6, "us", floor / took)


def _expert(operations: Operations, bits: int, outputs: int, inputs: int, target: torch.device) -> Tensor:
    if bits == 4:
        return operations["pack"](grouped(4, 32, WHOLE, outputs, inputs, target))
    return nn.Parameter(torch.randn(outputs, inputs, device=target).to(BF16) / 32, requires_grad=False)


def measure_small_cache(
    operations: Operations,
    target: torch.device,
    ceilings: Ceilings,
    cached: torch.dtype,
    sizes: tuple[tuple[int, int], ...] = ((32, 2048), (256, 1024)),
) -> Iterator[Result]:
    """Attention of decoding rows over a cache of 8 bits."""
    heads, kv_heads, dim = 32, 8, 128
    for rows, length in sizes:
        step = check.moved(make_step([1] * rows, [length] * rows, 64), target)
        kv = make_cache(step, kv_heads, dim, cached).to(target)
        q = torch.randn(rows, heads, dim, device=target).to(BF16)
        took = seconds_of(
            lambda q=q, kv=kv, step=step: operations["attention"](q, kv, step, scale=0.1),
            target,
        )
        rate = rows * length * kv_heads * dim * 2 / took
        name = f"decoding, {rows} x {length}, {str(cached).removeprefix('torch.')}"
        yield Result(name, "", rate / 1e12, "TB/s", rate / ceilings.bytes_per_second)
