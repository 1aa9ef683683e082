"""Mixtures of experts on CUDA: one product for all experts of a layer, with plain or quantized matrices.

Pairs of a token and one of its experts are sorted by expert, multiplied, and a token's results added up.
Shapes depend on the number of tokens alone, never on what they chose: so no result is waited for, and a graph
can be replayed for any choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.ops import expert_ops
from models.ops.expert_ops import WITHOUT_GATES
from worker.kernels.cuda.capabilities import product_tiles
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.linear import activation, gated
from worker.kernels.cuda.products.packing import Mixed, Packed
from worker.kernels.cuda.products.quantized import widened_in_order
from worker.kernels.cuda.products.quantized_kernel import WHOLE, MatrixForm, MatrixParts, multiply

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 28
"""The bytes that pairs of a token and an expert may take at a time: a step of more tokens is computed in
pieces."""
_STEP = 16
"""The multiple of tokens at which pieces begin, so that all begin at a multiple of 16 bytes."""
_BLOCK = 1024
_PLAIN_BITS = 16
"""What the kernel is told of numbers that are no codes."""


@triton.jit
def _chosen(ids_ptr, at, count, EXPERTS: constexpr):
    """The experts of pairs; EXPERTS for those beyond the last pair, and for experts of other ranks."""
    ids = tl.load(ids_ptr + at, mask=at < count, other=EXPERTS)
    return tl.where((ids < 0) | (ids > EXPERTS), EXPERTS, ids)


@triton.jit(do_not_specialize=["count", "blocks"])
def sort_pairs(
    ids_ptr, pairs_ptr, experts_ptr, count, blocks, EXPERTS: constexpr, BINS: constexpr, BM: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Write the pairs of one expert, in their order, into blocks of BM behind those of the experts before.

    The last block is filled up with -1. `experts` says whose each of the `blocks` is: -1 for those left over.
    """
    mine = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, count, BLOCK):
        counts += tl.histogram(_chosen(ids_ptr, start + tl.arange(0, BLOCK), count, EXPERTS), BINS)
    needed = tl.where(bins < EXPERTS, (counts + BM - 1) // BM, 0)
    first = tl.sum(tl.where(bins < mine, needed, 0), 0)
    own = tl.sum(tl.where(bins == mine, needed, 0), 0)
    done = 0
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_mine = (_chosen(ids_ptr, at, count, EXPERTS) == mine).to(tl.int32)
        place = first * BM + done + tl.cumsum(is_mine, 0) - 1
        tl.store(pairs_ptr + place, at, mask=is_mine > 0)
        done += tl.sum(is_mine, 0)
    left = done + tl.arange(0, BM)
    tl.store(pairs_ptr + first * BM + left, tl.full([BM], -1, tl.int32), mask=left < own * BM)
    for start in range(0, own, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tl.store(experts_ptr + first + block, tl.zeros([BLOCK], tl.int32) + mine, mask=block < own)
    if mine == EXPERTS - 1:
        for start in range(first + own, blocks, BLOCK):
            block = start + tl.arange(0, BLOCK)
            tl.store(experts_ptr + block, tl.full([BLOCK], -1, tl.int32), mask=block < blocks)


@triton.jit
def add_pairs(
    results_ptr, ids_ptr, weights_ptr, out_ptr, width, CHOSEN: constexpr, EXPERTS: constexpr, BLOCK: constexpr
):
    """Add the results of a token's experts by weight, in the order of the experts, for a piece of its row."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOSEN):
        pair = token * CHOSEN + choice
        expert = tl.load(ids_ptr + pair)
        there = (at < width) & (expert >= 0) & (expert < EXPERTS)
        result = tl.load(results_ptr + pair * width + at, mask=there, other=0.0).to(tl.float32)
        total += result * tl.load(weights_ptr + pair)
    tl.store(out_ptr + token * width + at, total.to(out_ptr.dtype.element_ty), mask=at < width)


class ExpertTable(tuple[Tensor, ...]):
    """The matrices of all experts of a layer, which lie one behind the other in memory."""

    outputs: int
    inputs: int
    width: int
    """Numbers or bytes from one row to the next."""
    expert_bytes: int
    parts: MatrixParts
    """The parts of the first expert's matrix."""
    form: MatrixForm


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
    table.parts = MatrixParts(memory, None, None, None, None, None)
    tile = 32 if first.dtype == torch.float32 else 64
    table.form = MatrixForm(0, _PLAIN_BITS, WHOLE, 1, 0, powers=False, levels=(0,) * 4, tile=tile)
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
        inner = activation(inner, kind) if kind in WITHOUT_GATES else gated(inner, kind)
        results = _product(inner, down, pairs, blocks, 1, down_bias, torch.float32)
        launch(
            add_pairs,
            (len(ids[some]), -(-down.outputs // _BLOCK)),
            *(results, ids[some], weights[some], out[some], down.outputs),
            *(ids.shape[1], len(down), _BLOCK),
            num_warps=4,
        )
    return out


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
    count = len(x) * chosen
    out = torch.empty(count, table.outputs, dtype=dtype, device=x.device)
    tiles = product_tiles(x.dtype, len(pairs) // len(experts))
    launch(
        multiply,
        (-(-table.outputs // tiles.outputs), len(experts), 1),
        *(x, table.parts, bias, out, pairs, experts),
        *(x.stride(0), count, table.outputs, table.inputs, table.width, table.expert_bytes, 1),
        *(table.form, chosen, tiles.outputs, tiles.rows, False),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


OPERATIONS: dict[str, Callable[..., Any]] = {"collect_experts": collect_experts, "experts": experts}
"""The operations of this module by name, for `models.ops.use`."""
