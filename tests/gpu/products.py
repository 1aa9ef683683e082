"""Products with quantized matrices, and experts: their rates, and how far rounded inputs lead them astray.

A product of few rows cannot take less time than it takes to read its matrix; experts, those that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from results import Result
from torch import Tensor, nn
from workbench import BF16, Workbench

from models.ops.expert_routing_ops import Routing
from models.ops.grouped_matrix import Grouped
from models.weight_coding import E4M3, WHOLE

FORMS = {"4 bits, groups of 128": (4, 128, WHOLE), "4 bits, groups of 32": (4, 32, WHOLE)} | {
    "8 bits, groups of 128": (8, 128, WHOLE),
    "e4m3, groups of 128": (8, 128, E4M3),
}
CHOSEN = 8
ROUNDED = 0.04
"""How far results may be from those whose inputs were not rounded, relative to their size."""
HOPPER = 90
"""The capability on which torch multiplies blocks of 128 x 128."""

Multiply = Callable[[Tensor, Tensor], Tensor]


def grouped(bench: Workbench, form: tuple[int, int, str], outputs: int, inputs: int) -> Grouped:
    """A matrix of random codes; those of e4m3 are numbers up to 2."""
    bits, group, kind = form
    codes = torch.randint(1 << (bits - 1), (outputs, inputs), device=bench.target, dtype=torch.uint8)
    if kind == E4M3:
        codes = codes % 64
    scales = torch.rand(outputs, -(-inputs // group), device=bench.target).half() / (1 << bits)
    return Grouped(codes, bits, group, scales, None, inputs, BF16, kind=kind)


def measure_products(bench: Workbench) -> Iterator[Result]:
    """Square matrices in each form, beside a plain one."""
    operations, side = bench.operations, bench.size(8192, 128)
    matrices: dict[str, Tensor] = {"bfloat16": operations["pack"](bench.random(side, side))}
    for name, form in FORMS.items():
        matrices[name] = operations["pack"](grouped(bench, form, side, side))
    for rows in bench.some((1, 16, 64, 512)):
        x = bench.random(bench.rows(rows), side)
        for name, matrix in matrices.items():
            took = bench.seconds_of(lambda x=x, matrix=matrix: operations["linear"](x, matrix))
            floor = bench.floor(matrix.nbytes, 2 * len(x) * side**2)
            yield Result(f"product, {name}, {rows} rows", "", took * 1e6, "us", floor / took)


def ways_to_multiply(bench: Workbench, form: str) -> dict[str, Multiply]:
    """The ways to multiply by a matrix in e4m3 on this card; the first rounds no inputs."""
    from worker.kernels.cuda.operations import cuda_operations
    from worker.kernels.cuda.products.rounded import multiply_in_8_bits, torch_multiplies

    card = bench.card
    ways: dict[str, Multiply] = {"16 bits": cuda_operations(replace(card, capability=80))["linear"]}
    if (
        card.rounds_inputs
        and torch_multiplies(card, bench.target)
        and (form == "rows" or card.capability == HOPPER)
    ):
        ways["8 bits by torch"] = partial(multiply_in_8_bits, bias=None, wide=False)
    return ways


def measure_rounding(
    bench: Workbench,
    counts: tuple[int, ...] = (1, 16, 64, 256, 2048),
    ways: dict[str, Multiply] | None = None,
) -> Iterator[Result]:
    """Products in e4m3 whose inputs keep their bits, beside those that round them, which come after it."""
    side = bench.size(8192, 256)
    for form, group in (("rows", 0), ("blocks of 128", 128)):
        matrix = bench.operations["pack"](small_floats(bench, side, group))
        multiplies = ways or ways_to_multiply(bench, form)
        for rows in bench.some(counts):
            x = bench.random(bench.rows(rows), side)
            kept: Tensor | None = None
            for way, multiply in multiplies.items():
                out = multiply(x, matrix).float()
                kept = out if kept is None else kept
                apart = ((out - kept).norm() / kept.norm()).item()
                took = bench.seconds_of(lambda x=x, matrix=matrix, multiply=multiply: multiply(x, matrix))
                floor = bench.floor(matrix.nbytes, 2 * len(x) * side**2)
                said = f"differs by {apart:.1%}" if apart else ""
                wrong = int(not apart < ROUNDED)
                name = f"e4m3, {form}, {way}, {rows} rows"
                yield Result(name, said, took * 1e6, "us", floor / took, wrong)


def small_floats(bench: Workbench, side: int, group: int) -> Grouped:
    """A square matrix in e4m3 whose inputs may be rounded, with a scale for each row, or block of 128."""
    codes = bench.random(side, side).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(side, -(-side // group) if group else 1, device=bench.target) + 0.5
    if group:
        scales = scales[::group].repeat_interleave(group, 0)[:side]
    return Grouped(codes, 8, group, scales, None, side, BF16, input_bits=8, kind=E4M3)


def measure_experts(bench: Workbench) -> Iterator[Result]:
    """A layer of experts, plain and with 4 bits."""
    operations = bench.operations
    size, inner, experts = bench.size(2048, 32), bench.size(768, 32), bench.size(64, CHOSEN)
    router, routing = bench.random(experts, size), Routing(experts=experts, chosen=CHOSEN)
    for tokens in bench.some((1, 16, 1024)):
        x = bench.random(bench.rows(tokens), size)
        took = bench.seconds_of(lambda x=x: operations["route"](x, router, None, None, routing))
        yield Result(f"routing, {tokens} tokens", "", took * 1e6, "us")
    for name, bits in (("bfloat16", 16), ("4 bits", 4)):
        shapes = ((2 * inner, size), (size, inner))
        gate_up, down = (
            operations["collect_experts"]([_expert(bench, bits, *shape) for _ in range(experts)])
            for shape in shapes
        )
        for tokens in bench.some((1, 16, 1024)):
            x = bench.random(bench.rows(tokens), size)
            ids = torch.stack([torch.randperm(experts)[:CHOSEN].sort().values for _ in x])
            ids, weights = ids.int().to(bench.target), torch.rand(len(x), CHOSEN, device=bench.target)
            given = (x, ids, weights, gate_up, down, "silu")
            took = bench.seconds_of(lambda given=given: operations["experts"](*given))
            read = len(ids.unique()) * (gate_up[0].nbytes + down[0].nbytes)
            floor = bench.floor(read, 6 * len(x) * CHOSEN * size * inner)
            yield Result(f"experts, {name}, {tokens} tokens", "", took * 1e6, "us", floor / took)


def _expert(bench: Workbench, bits: int, outputs: int, inputs: int) -> Any:
    if bits == 4:
        return bench.operations["pack"](grouped(bench, (4, 32, WHOLE), outputs, inputs))
    return nn.Parameter(bench.random(outputs, inputs) / 32, requires_grad=False)
