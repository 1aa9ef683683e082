"""Mixtures of experts by the C kernels: `csrc/route.c`, and `csrc/experts.c` on the panels of `packing.py`.

Torch computes what the kernels cannot: other number types, and experts whose parts differ in form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from models.ops import expert_routing_ops
from models.ops.expert_routing_ops import Routing
from worker.kernels.cpu.library import Library
from worker.kernels.cpu.packing import Packed, described_in_one
from worker.kernels.cpu.rowwise import GATES
from worker.kernels.cpu.tensors import KINDS, address, empty, refuse
from worker.kernels.cpu.torch_operations import experts_by

Operation = Callable[..., Any]


class ExpertTable(tuple[Packed, ...]):
    """The matrices of all experts of a layer, and where their descriptions lie one after the other."""

    described: ctypes.Array[Any]
    address: int

    @classmethod
    def of(cls, matrices: Sequence[Packed]) -> ExpertTable:
        table = cls(matrices)
        table.described = described_in_one(matrices)
        table.address = ctypes.addressof(table.described)
        return table


def bind(library: Library, linear: Operation, gated_linear: Operation) -> dict[str, Operation]:
    """The operations of this module by name, for `models.ops.use`; `linear` reads packed matrices."""
    return {
        "route": _route(library, linear),
        "collect_experts": _collect,
        "experts": _experts(library, experts_by(gated_linear, linear)),
        "add_gated": _add_gated(library),
    }


def _route(library: Library, linear: Operation) -> Operation:
    run = library.function("choose")

    def route(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        correction: Tensor | None,
        routing: Routing,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if type(weight) is not Packed:
            return expert_routing_ops.route(x, weight, bias, correction, routing, factors)
        if weight.columns != routing.experts:
            refuse("route", x=x, weight=weight)
        fits = (routing.experts,), torch.float32
        for numbers in (correction, factors):
            if numbers is not None and (numbers.shape, numbers.dtype) != fits:
                refuse("route", x=x, correction=correction, factors=factors)
        logits = linear(x, weight, bias, wide=True)
        ids = empty((len(x), routing.chosen), torch.int32)
        shares = empty((len(x), routing.chosen), torch.float32)
        run(
            *(logits.data_ptr(), address(correction), address(factors)),
            *(ids.data_ptr(), shares.data_ptr(), len(x), routing.experts, routing.chosen),
            *(routing.scores == "sigmoid", routing.normalised),
            *(routing.groups, routing.kept_groups, routing.summed_best),
            *(routing.epsilon, routing.least_sum, routing.factor),
        )
        return ids, shares

    return route


def _collect(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    if not _all_packed(matrices):
        return tuple(matrices)
    first = matrices[0]
    sizes = (first.inputs, first.outputs, first.columns, first.numbers)
    if any((each.inputs, each.outputs, each.columns, each.numbers) != sizes for each in matrices):
        refuse("collect_experts", **{f"expert {number}": each for number, each in enumerate(matrices)})
    return ExpertTable.of(matrices)


def _all_packed(matrices: Sequence[Tensor]) -> TypeGuard[Sequence[Packed]]:
    return all(type(matrix) is Packed and not matrix.apart for matrix in matrices)


def _experts(library: Library, others: Operation) -> Operation:
    run = library.function("experts")

    def experts(
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Sequence[Tensor],
        down: Sequence[Tensor],
        kind: str,
        *,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        places: Tensor | None = None,
        wide: bool = False,
    ) -> Tensor:
        biases = gate_up_bias, down_bias
        if type(gate_up) is not ExpertTable or type(down) is not ExpertTable or kind not in GATES:
            return others(
                *(x, ids, weights, gate_up, down, kind),
                gate_up_bias=gate_up_bias,
                down_bias=down_bias,
                places=places,
                wide=wide,
            )
        _check(x, ids, weights, gate_up, down, biases)
        if places is not None and (places.dim() != 1 or places.dtype != torch.int32):
            refuse("experts", x=x, places=places)
        gate_up_bias, down_bias = (None if bias is None else bias.contiguous() for bias in biases)
        ids, weights = ids.contiguous(), weights.contiguous()
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, inputs = x.shape
        out = empty((rows, down[0].outputs), torch.float32 if wide else x.dtype)
        run(
            *(gate_up.address, down.address, len(down), x.data_ptr(), x.stride(0), inputs),
            *(ids.data_ptr(), address(places), weights.data_ptr(), ids.shape[1]),
            *(address(gate_up_bias), address(down_bias)),
            *(out.data_ptr(), rows, KINDS[out.dtype], GATES[kind]),
        )
        return out

    return experts


def _check(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertTable,
    down: ExpertTable,
    biases: tuple[Tensor | None, Tensor | None],
) -> None:
    """Refuse rows, choices, matrices and biases that do not fit each other."""
    into, out_of = gate_up[0], down[0]
    if x.shape[1] != into.inputs or x.dtype != into.numbers or out_of.numbers != into.numbers:
        refuse("experts", x=x)
    if into.columns != out_of.inputs or len(gate_up) != len(down) or ids.shape != weights.shape:
        refuse("experts", x=x, ids=ids, weights=weights)
    if len(ids) != len(x) or (ids.dtype, weights.dtype) != (torch.int32, torch.float32):
        refuse("experts", x=x, ids=ids, weights=weights)
    for bias, matrix in zip(biases, (into, out_of), strict=True):
        if bias is not None and (bias.shape != (len(down), matrix.outputs) or bias.dtype != x.dtype):
            refuse("experts", x=x, bias=bias)


def _add_gated(library: Library) -> Operation:
    run = library.function("add_gated", quick=True)

    def add_gated(x: Tensor, rows: Tensor, gate: Tensor, total: Tensor) -> Tensor:
        if x.shape != rows.shape or x.shape != total.shape or gate.shape != x.shape[1:]:
            refuse("add_gated", x=x, rows=rows, gate=gate, total=total)
        given = (x, rows, gate, total)
        if x.dtype not in KINDS or any(each.dtype != x.dtype for each in given):
            return expert_routing_ops.add_gated(x, rows, gate, total)
        x, rows, gate, total = (each.contiguous() for each in given)
        out = empty(x.shape, x.dtype)
        run(
            *(x.data_ptr(), rows.data_ptr(), gate.data_ptr(), total.data_ptr(), out.data_ptr()),
            *(*x.shape, KINDS[x.dtype]),
        )
        return out

    return add_gated
