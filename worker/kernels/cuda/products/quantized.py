"""Products with quantized matrices: our own kernel for few rows, cuBLAS with widened matrices for many.

Where a checkpoint wants inputs of 8 bits and torch multiplies these, they are rounded for any number of rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.kernels.cuda.capabilities import MANY_ROWS, Card, product_tiles
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.products.packing import Mixed, Packed
from worker.kernels.cuda.products.quantized_kernel import join_splits, multiply, widen_rows
from worker.kernels.cuda.products.rounded import multiply_in_8_bits, rounds_inputs

_MOST_WIDENED = 1 << 26
"""The numbers of a matrix that are widened at a time, to bound the memory of a step."""
_MOST_SPLITS, _LEAST_INPUTS = 16, 512
"""The parts into which the inputs are split, and the least inputs of each."""
_PROGRAMS = 4
"""The programs of a multiprocessor, so that others compute while one waits. With two, an H100 took 29 us for
a product with 4 bits whose instructions take 14."""
_BLOCK = 256
_WIDENED = 32
"""The rows that a program widens."""


def multiply_plain(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool) -> Tensor:
    """x [T, in] times a plain matrix by cuBLAS. What is wanted in float32 is not rounded to 16 bits first."""
    if wide and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out + bias
    out = F.linear(x, weight, bias)
    return out.float() if wide else out


def multiply_quantized(x: Tensor, weight: Packed, bias: Tensor | None, card: Card, *, wide: bool) -> Tensor:
    """x [T, in] times a quantized matrix [out, in] -> [T, out], in float32 if it is wanted `wide`."""
    if x.dtype != weight.numbers:
        raise ValueError(f"inputs of {x.dtype} do not fit a matrix that was packed for {weight.numbers}")
    x = ordered(x, weight)
    if len(x) and rounds_inputs(weight, card):
        return multiply_in_8_bits(x, weight, bias, wide=wide)
    if len(x) >= MANY_ROWS:
        return _multiply_widened(x, weight, bias, wide=wide)
    out = torch.empty(len(x), weight.outputs, dtype=torch.float32 if wide else x.dtype, device=x.device)
    if len(x):
        _multiply(x, weight, bias, out, card.processors)
    return out


def ordered(x: Tensor, weight: Packed) -> Tensor:
    """The inputs in the order of the matrix's columns, each row contiguous."""
    if weight.order is None:
        return x if x.stride(1) == 1 else x.contiguous()
    if weight.padded:
        x = F.pad(x, (0, 1))  # the place behind the last input is a zero
    return x.index_select(1, weight.order)


def look_up(ids: Tensor, weight: Packed) -> Tensor:
    """The rows [T, in] that `ids` [T] int64 names, widened."""
    return _widen(weight, ids, 0, len(ids))


def widened(weight: Packed, first: int, count: int) -> Tensor:
    """So many rows of a matrix from the row `first` on, with the columns in their own order."""
    return _widen(weight, None, first, count)


def widened_in_order(weight: Tensor) -> Tensor:
    """The plain matrix [outputs, inputs], whatever form it is packed in."""
    if isinstance(weight, Mixed):
        return torch.cat([widened_in_order(part) for part in weight.apart])
    if not isinstance(weight, Packed):
        return weight
    plain = widened(weight, 0, weight.outputs)
    if weight.order is None:
        return plain
    inputs = weight.bytes_before // (weight.outputs * plain.itemsize)
    out = plain.new_zeros(weight.outputs, inputs + 1)  # the last is that of columns of no input
    out[:, weight.order] = plain
    return out[:, :inputs].contiguous()


def splits_of(weight: Packed, outputs: int, processors: int) -> int:
    """The largest power of two with which all programs run at once, whatever the number of rows is."""
    programs, splits = -(-weight.outputs // outputs), 1
    most = min(_MOST_SPLITS, weight.inputs // _LEAST_INPUTS, _PROGRAMS * processors // programs)
    while 2 * splits <= most:
        splits *= 2
    return splits


def _multiply(x: Tensor, weight: Packed, bias: Tensor | None, out: Tensor, processors: int) -> None:
    rows, outputs, form = len(x), weight.outputs, weight.form
    tiles = product_tiles(x.dtype, rows, form.tile * form.bits // 8)
    splits = splits_of(weight, tiles.outputs, processors)
    written = out
    if splits > 1:
        written = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    launch(
        multiply,
        (-(-outputs // tiles.outputs), -(-rows // tiles.rows), splits),
        *(x, weight.parts, bias, written),
        *(x.stride(0), rows, outputs, weight.inputs, weight.width, splits),
        *(form, tiles.outputs, tiles.rows, splits > 1),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        launch(
            join_splits,
            (rows, -(-outputs // _BLOCK)),
            *(written, bias, out, rows, outputs, splits, _MOST_SPLITS, _BLOCK),
            num_warps=4,
        )


def _multiply_widened(x: Tensor, weight: Packed, bias: Tensor | None, *, wide: bool) -> Tensor:
    """Widen some rows of the matrix at a time, and multiply."""
    step = max(1, _MOST_WIDENED // weight.inputs)
    pieces = [
        multiply_plain(
            x,
            widened(weight, first, min(step, weight.outputs - first)),
            None if bias is None else bias[first : first + step],
            wide=wide,
        )
        for first in range(0, weight.outputs, step)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _widen(weight: Packed, ids: Tensor | None, first: int, count: int) -> Tensor:
    form = weight.form
    out = torch.empty(count, weight.inputs, dtype=weight.numbers, device=weight.device)
    if count:
        launch(
            widen_rows,
            (-(-count // _WIDENED), -(-weight.inputs // form.tile)),
            *(ids, weight.parts, out, first, count, weight.outputs, weight.inputs, weight.width),
            *(form, _WIDENED),
            num_warps=4,
        )
    return out
