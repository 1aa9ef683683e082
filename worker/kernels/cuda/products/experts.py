"""Mixtures of experts on CUDA: one product for all experts of a layer, with plain or quantized matrices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from models.ops import expert_ops
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.products.grouped import widened_in_order
from worker.kernels.cuda.products.kernel import WHOLE, multiply
from worker.kernels.cuda.products.packing import Form, Mixed, Packed
from worker.kernels.cuda.products.pairs import add_pairs, sort_pairs
from worker.kernels.cuda.tiles import product_tiles

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 28
"""The bytes that pairs of a token and an expert may take at a time: a step of more tokens is computed in
pieces."""
_STEP = 16
"""The multiple of tokens at which pieces begin, so that all begin at a multiple of 16 bytes."""
_BLOCK = 1024
_PLAIN_BITS = 16
"""What the kernel is told of numbers that are no codes."""

Gate = Callable[[Tensor, str], Tensor]


class ExpertTable(tuple[Tensor, ...]):
    """The matrices of all experts of a layer, which lie one behind the other in memory."""

    outputs: int
    inputs: int
    width: int
    """Numbers or bytes from one row to the next."""
    expert_bytes: int
    parts: tuple[Tensor | None, ...]
    """The parts of the first expert's matrix."""
    form: Form


def bind(gated: Gate) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`; `gated` is the operation of that name."""
    return {"collect_experts": collect_experts, "experts": _experts(gated)}


def collect_experts(matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    """Bring matrices one behind the other. Those that differ in form, or have orders, are widened first."""
    first = matrices[0]
    if any(type(matrix) in (Packed, Mixed) for matrix in matrices):
        if isinstance(first, Packed) and all(_are_alike(first, other) for other in matrices):
            return _collect_packed([matrix for matrix in matrices if isinstance(matrix, Packed)])
        logger.info("experts whose matrices differ in form, or have inputs in another order, are widened")
        for matrix in matrices:
            matrix.data = widened_in_order(matrix)
    table = ExpertTable(matrices)
    outputs, inputs = first.shape
    memory = torch.empty(len(matrices), outputs, inputs, dtype=first.dtype, device=first.device)
    for matrix, place in zip(matrices, memory, strict=True):
        matrix.data = place.copy_(matrix.data)
    table.outputs, table.inputs, table.width = outputs, inputs, inputs
    table.expert_bytes = memory[0].nbytes
    table.parts = (memory, None, None, None, None, None)
    tile = 32 if first.dtype == torch.float32 else 64
    table.form = Form(0, _PLAIN_BITS, WHOLE, 1, 0, powers=False, levels=(0,) * 4, tile=tile)
    return table


def _are_alike(one: Packed, other: Tensor) -> bool:
    return (
        isinstance(other, Packed)
        and one.order is None
        and other.order is None
        and (one.form, one.nbytes, one.outputs, one.inputs, one.numbers)
        == (other.form, other.nbytes, other.outputs, other.inputs, other.numbers)
        and all((a is None) == (b is None) for a, b in zip(one.parts, other.parts, strict=True))
    )


def _collect_packed(matrices: Sequence[Packed]) -> ExpertTable:
    table, first = ExpertTable(matrices), matrices[0]
    memory = torch.empty(len(matrices), first.nbytes, dtype=torch.uint8, device=first.device)
    for matrix, place in zip(matrices, memory, strict=True):
        matrix.move(place)
        matrix.rounds_inputs = False  # the kernel of experts rounds none
    table.outputs, table.inputs, table.width = first.outputs, first.inputs, first.width
    table.expert_bytes, table.parts, table.form = first.nbytes, first.parts, first.form
    return table


def _experts(gated: Gate) -> Callable[..., Tensor]:
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
        if places is not None:
            ids = places[ids.long()]  # -1 for experts of other ranks
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        if type(gate_up) is not ExpertTable or type(down) is not ExpertTable:
            return expert_ops.experts(x, ids, weights, gate_up, down, kind, **biases, wide=wide)
        out = torch.empty(len(x), down.outputs, dtype=torch.float32 if wide else x.dtype, device=x.device)
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        per_token = ids.shape[1] * (2 * gate_up.outputs * x.itemsize + 4 * down.outputs)
        step = max(_STEP, _MOST_BYTES // per_token // _STEP * _STEP)
        for start in range(0, len(x), step):
            some = slice(start, start + step)
            pairs, blocks = _sorted(ids[some], len(gate_up), x.dtype)
            inner = _product(x[some], gate_up, pairs, blocks, ids.shape[1], gate_up_bias, x.dtype)
            inner = gated(inner, kind)
            results = _product(inner, down, pairs, blocks, 1, down_bias, torch.float32)
            launch(
                add_pairs,
                (len(ids[some]), -(-down.outputs // _BLOCK)),
                *(results, ids[some], weights[some], out[some], down.outputs),
                *(ids.shape[1], len(down), _BLOCK),
                num_warps=4,
            )
        return out

    return experts


def _sorted(ids: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The pairs [blocks * BM] expert by expert, and the expert [blocks] of each block."""
    tile = product_tiles(dtype, ids.numel() // count).rows
    blocks = min(ids.numel(), ids.numel() // tile + count)
    pairs = torch.empty(blocks * tile, dtype=torch.int32, device=ids.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    launch(
        sort_pairs,
        (count,),
        *(ids, pairs, experts, ids.numel(), blocks, count, 1 << count.bit_length(), tile, _BLOCK),
        num_warps=4,
    )
    return pairs, experts


def _product(
    x: Tensor,
    table: ExpertTable,
    pairs: Tensor,
    experts: Tensor,
    chosen: int,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The rows of all pairs [T * chosen, outputs], each by the matrix of its expert."""
    count, form = len(x) * chosen, table.form
    out = torch.empty(count, table.outputs, dtype=dtype, device=x.device)
    tiles = product_tiles(x.dtype, len(pairs) // len(experts))
    launch(
        multiply,
        (-(-table.outputs // tiles.outputs), len(experts), 1),
        *(x, *table.parts, bias, out, pairs, experts),
        *(x.stride(0), count, table.outputs, table.inputs, table.width, table.expert_bytes, 1),
        *(*form.constants, chosen, tiles.outputs, form.tile, tiles.rows, False),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
