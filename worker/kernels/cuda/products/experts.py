"""Mixtures of experts on CUDA: one product for all experts of a layer, with plain or quantized matrices.

Pairs of a token and one of its experts are sorted by expert, multiplied, and a token's results added up. The
product that makes gates applies them, too, and the pairs of one token alone are not sorted. Shapes depend on
the number of tokens alone, never on what they chose: so no result is waited for, and a graph can be replayed
for any choice.
"""

# Triton hands a NamedTuple to a kernel as it is.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.ops import expert_routing_ops
from models.ops.expert_routing_ops import WITHOUT_GATES
from worker.kernels.cuda.capabilities import ProductTiles, expert_tiles
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.linear import GATES, applied, let_through
from worker.kernels.cuda.products.packing import Mixed, Packed
from worker.kernels.cuda.products.quantized import widened_in_order
from worker.kernels.cuda.products.quantized_kernel import WHOLE, MatrixForm, MatrixParts, add_tile, in_units

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 28
"""The bytes that what lies between two products, and results to be added, may take at a time."""
_STEP = 16
"""The multiple of tokens at which pieces begin, so that all begin at a multiple of 16 bytes."""
_COLUMNS = 128
"""The multiple of outputs at which pieces of results begin: no tile is wider."""
_BLOCK, _FEW_PAIRS = 1024, 8192
"""The numbers that a program takes at a time, and the pairs from which on four times as many are sorted."""
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
def multiply_pairs(
    x_ptr, parts, bias_ptr, out_ptr, pairs_ptr, experts_ptr, x_stride, out_width, begin, outputs, inputs,
    width, expert_bytes, FORM: constexpr, CHOSEN: constexpr, EXPERTS: constexpr, FUNCTION: constexpr,
    GATED: constexpr, BN: constexpr, BM: constexpr,
):  # fmt: skip
    """Multiply BM pairs of one expert, which `experts` names, by BN rows of its matrix, from `begin` on.

    Each pair, -1 for none, reads the row of its token, of whose CHOSEN pairs it is one; or with CHOSEN 1 its
    own. Without `pairs` a block is one pair. The parts of an expert's matrix lie `expert_bytes` behind those
    of the expert before. GATED: the first half of a matrix makes gates, the second what they let through, and
    a program takes as many rows of each.
    """
    block = tl.program_id(1)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if (expert < 0) | (expert >= EXPERTS):
        return
    lane = tl.arange(0, BM)
    if pairs_ptr is None:
        pair, held = (lane + block).to(tl.int64), lane < 1
    else:
        pair = tl.load(pairs_ptr + block * BM + lane).to(tl.int64)
        held = pair >= 0
    row = tl.where(held, pair, 0) // CHOSEN
    made: constexpr = BN // 2 if GATED else BN
    number, column = tl.arange(0, BN), tl.program_id(0) * made + tl.arange(0, made)
    n = begin + tl.program_id(0) * made + number % made + tl.where(number < made, 0, outputs // 2)
    there = tl.program_id(0) * made + number % made < out_width
    skipped = expert * expert_bytes
    size: constexpr = parts.codes.dtype.element_ty.primitive_bitwidth // 8
    matrix = parts.codes + skipped // size + n.to(tl.int64)[:, None] * width
    total = tl.zeros([BN, BM], tl.float32)
    for tile in range(tl.cdiv(inputs, FORM.tile)):
        total = add_tile(
            total, matrix, n, there, tile * FORM.tile, x_ptr, row, held, inputs, x_stride, parts, skipped,
            outputs, FORM,
        )  # fmt: skip
    total = in_units(total, FORM)  # pyright: ignore
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * outputs + n, mask=there, other=0.0)
        total += bias.to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, made, BM]), (1, 2, 0)))
        out = let_through(gate, up, FUNCTION)
    else:
        out = applied(total, FUNCTION)
    at = out_ptr + pair[None, :] * out_width + column[:, None]
    mask = (column < out_width)[:, None] & held[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_pairs(
    results_ptr, ids_ptr, weights_ptr, out_ptr, width, out_stride, CHOSEN: constexpr, EXPERTS: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Add the results of a token's experts by weight, in the order of the experts, for a piece of its row."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOSEN):  # so that loads of all are on their way at once
        pair = token * CHOSEN + choice
        expert = tl.load(ids_ptr + pair)
        there = (at < width) & (expert >= 0) & (expert < EXPERTS)
        result = tl.load(results_ptr + pair * width + at, mask=there, other=0.0).to(tl.float32)
        total += result * tl.load(weights_ptr + pair)
    tl.store(out_ptr + token * out_stride + at, total.to(out_ptr.dtype.element_ty), mask=at < width)


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
    everywhere = len(gate_up) if places is None else len(places)
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    if type(gate_up) is not ExpertTable or type(down) is not ExpertTable:
        return expert_routing_ops.experts(x, ids, weights, gate_up, down, kind, **biases, wide=wide)
    out = torch.empty(len(x), down.outputs, dtype=torch.float32 if wide else x.dtype, device=x.device)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    chosen, gated = ids.shape[1], kind not in WITHOUT_GATES
    step = max(_STEP, _MOST_BYTES // (2 * chosen * down.inputs * x.itemsize) // _STEP * _STEP)
    for start in range(0, len(x), step):
        some = slice(start, start + step)
        blocks = _sorted(ids[some], gate_up, everywhere, x.dtype)
        inner = torch.empty(ids[some].numel(), down.inputs, dtype=x.dtype, device=x.device)
        _multiply(x[some], gate_up, blocks, inner, chosen, gate_up_bias, GATES[kind], gated=gated)
        columns = max(_COLUMNS, _MOST_BYTES // (8 * len(inner)) // _COLUMNS * _COLUMNS)
        for first in range(0, down.outputs, columns):
            width = min(columns, down.outputs - first)
            results = torch.empty(len(inner), width, dtype=torch.float32, device=x.device)
            _multiply(inner, down, blocks, results, 1, down_bias, 0, first=first)
            launch(
                add_pairs,
                (len(ids[some]), -(-width // _BLOCK)),
                *(results, ids[some], weights[some], out[some, first : first + width]),
                *(width, out.stride(0), chosen, len(down), _BLOCK),
                num_warps=4,
            )
    return out


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Pairs in blocks of one expert each."""

    pairs: Tensor | None
    """[blocks * rows] of pairs, -1 for none; None: each block is one pair."""
    experts: Tensor
    """[blocks]: the expert of each block, -1 for a block of none."""
    tiles: ProductTiles


def _sorted(ids: Tensor, table: ExpertTable, everywhere: int, dtype: torch.dtype) -> _Blocks:
    """Sort pairs by expert. No two of one token have the same expert, so these are a block each.

    `everywhere`: the experts among which `ids` are spread, those of other ranks among them.
    """
    count = len(table)
    tiles = expert_tiles(dtype, ids.numel() // everywhere, plain=table.form.bits == _PLAIN_BITS)
    if len(ids) == 1:
        return _Blocks(None, ids[0], tiles)
    blocks = min(ids.numel(), ids.numel() // tiles.rows + count)
    pairs = torch.empty(blocks * tiles.rows, dtype=torch.int32, device=ids.device)
    experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    launch(
        sort_pairs,
        (count,),
        *(ids, pairs, experts, ids.numel(), blocks, count, 1 << count.bit_length(), tiles.rows),
        *((_BLOCK,) if ids.numel() <= _FEW_PAIRS else (4 * _BLOCK,)),
        num_warps=8,
    )
    return _Blocks(pairs, experts, tiles)


def _multiply(
    x: Tensor,
    table: ExpertTable,
    blocks: _Blocks,
    out: Tensor,
    chosen: int,
    bias: Tensor | None,
    function: int,
    *,
    gated: bool = False,
    first: int = 0,
) -> None:
    """Write columns of the rows of all pairs, from the column `first` on, each by its expert's matrix."""
    tiles, form = blocks.tiles, table.form
    if tiles.inputs:
        form = form._replace(tile=tiles.inputs)
    made = tiles.outputs // 2 if gated else tiles.outputs
    launch(
        multiply_pairs,
        (-(-out.shape[1] // made), len(blocks.experts)),
        *(x, table.parts, bias, out, blocks.pairs, blocks.experts, x.stride(0), out.shape[1], first),
        *(table.outputs, table.inputs, table.width, table.expert_bytes),
        *(form, chosen, len(table), function, gated, tiles.outputs, tiles.rows),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


OPERATIONS: dict[str, Callable[..., Any]] = {"collect_experts": collect_experts, "experts": experts}
"""The operations of this module by name, for `models.ops.use`."""
