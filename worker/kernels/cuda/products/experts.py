"""Mixtures of experts on CUDA: one product for all experts of a layer, with plain or quantized matrices.

Pairs of a token and one of its experts are sorted by expert, multiplied, and a token's results added up. The
product that makes gates applies them, too, and the pairs of one token alone are not sorted. Shapes depend on
the number of tokens alone, never on what they chose: so no result is waited for, and a graph can be replayed
for any choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.ops import expert_ops
from models.ops.expert_ops import WITHOUT_GATES
from worker.kernels.cuda.capabilities import ProductTiles, expert_tiles
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.linear import GATES
from worker.kernels.cuda.products.experts_kernel import add_pairs, multiply_pairs, sort_pairs
from worker.kernels.cuda.products.packing import Mixed, Packed
from worker.kernels.cuda.products.quantized import widened_in_order
from worker.kernels.cuda.products.quantized_kernel import WHOLE, MatrixForm, MatrixParts

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
        return expert_ops.experts(x, ids, weights, gate_up, down, kind, **biases, wide=wide)
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
