"""Products with quantized matrices in Triton: one kernel for all forms, and one that widens rows.

A program computes a tile [BN, BM] of the product: so many outputs of so many rows. The matrix is the left
side of it, so a few rows fill up the narrow side of the matrix unit. It takes the inputs in tiles of BK,
none of which spans two groups: numbers of a tile are whole or short, so they are exact in 16 bits, and the
sum over a tile is scaled once, in float32.

Codes of 4 bits lie two in a byte: that of a column in the first half of a tile, and above it that of the
column as far into the second half. A code becomes a byte b, then the float32 with the bits of 2^23 + b, from
which 2^23 and the byte that means 0 are taken away: no instruction that converts whole numbers is needed.

What is known when a model is loaded is a constant of a variant: BITS of a code, 16 for numbers that are not
codes; KIND, as in `packing.py`; W0 to W3, the bytes of 16 levels; GROUP columns that share a scale; RUN
groups that share factors, 0 for none; POWERS, whether scales are exponents of 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

WHOLE, E4M3, LEVELS, HALVES = 0, 1, 2, 3
"""The kinds of codes: whole numbers, numbers of 8 bits, 16 levels, and 16 levels in units of a half."""
_E4M3: constexpr = constexpr(E4M3)
_LEVELS: constexpr = constexpr(LEVELS)
_HALVES: constexpr = constexpr(HALVES)


@triton.jit
def _numbers(code, zero, KIND: constexpr, W0: constexpr, W1: constexpr, W2: constexpr, W3: constexpr):
    """What codes [BN, K] int32 mean, without their scales, in float32; `zero` [BN, 1] means 0."""
    if KIND == _E4M3:
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: exponents are counted anew
        return tl.where((code & 127) == 127, float("nan"), number)
    if KIND >= _LEVELS:
        word = tl.where((code & 8) != 0, tl.where((code & 4) != 0, W3, W2), tl.where((code & 4) != 0, W1, W0))
        code = (word >> ((code & 3) * 8)) & 255
    if KIND == _HALVES:
        return (code | 0x4A800000).to(tl.float32, bitcast=True) - (4194304.0 + zero * 0.5)
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)


@triton.jit
def _of_group(
    scales_ptr, minimums_ptr, factors_ptr, low_factors_ptr, offsets_ptr, group, n, there, outputs,
    ZERO: constexpr, RUN: constexpr, POWERS: constexpr,
):  # fmt: skip
    """The scale, the minimum and the code of zero [BN] of one group, in float32."""
    place = group * outputs + n
    scale = tl.load(scales_ptr + place, mask=there, other=0)
    if POWERS:
        scale = tl.maximum(scale.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    else:
        scale = scale.to(tl.float32)
    minimum = tl.zeros_like(scale)
    if minimums_ptr is not None:
        minimum = tl.load(minimums_ptr + place, mask=there, other=0).to(tl.float32)
    if RUN > 0:
        run = group // RUN * outputs + n
        scale *= tl.load(factors_ptr + run, mask=there, other=0.0).to(tl.float32)
        if minimums_ptr is not None:
            minimum *= tl.load(low_factors_ptr + run, mask=there, other=0.0).to(tl.float32)
    zero = tl.zeros_like(scale) + ZERO
    if offsets_ptr is not None:
        zero = tl.load(offsets_ptr + place, mask=there, other=0).to(tl.float32)
    return scale, minimum, zero[:, None]


@triton.jit
def _inputs(x_ptr, row, held, first, inputs, x_stride, K: constexpr):
    """The inputs [K, BM] that begin with the column `first`, zero beyond the last."""
    k = first + tl.arange(0, K)
    mask = (k < inputs)[:, None] & held[None, :]
    return tl.load(x_ptr + row[None, :] * x_stride + k[:, None], mask=mask, other=0.0)


@triton.jit
def _after(ptr, skipped):
    """The place so many bytes behind a pointer."""
    return ptr + skipped // (ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def _matrix_of(
    expert, expert_bytes, codes_ptr, scales_ptr, minimums_ptr, factors_ptr, low_factors_ptr, offsets_ptr,
    BITS: constexpr, RUN: constexpr,
):  # fmt: skip
    """The parts of one expert's matrix, which lie `expert_bytes` behind those of the one before."""
    skipped = expert * expert_bytes
    codes_ptr = _after(codes_ptr, skipped)
    if BITS < 16:
        scales_ptr = _after(scales_ptr, skipped)
    if minimums_ptr is not None:
        minimums_ptr = _after(minimums_ptr, skipped)
    if RUN > 0:
        factors_ptr = _after(factors_ptr, skipped)
        if minimums_ptr is not None:
            low_factors_ptr = _after(low_factors_ptr, skipped)
    if offsets_ptr is not None:
        offsets_ptr = _after(offsets_ptr, skipped)
    return codes_ptr, scales_ptr, minimums_ptr, factors_ptr, low_factors_ptr, offsets_ptr


@triton.jit
def _add_tile(
    total, matrix, n, there, first, x_ptr, row, held, inputs, x_stride, scales_ptr, minimums_ptr, factors_ptr,
    low_factors_ptr, offsets_ptr, outputs, ZERO: constexpr, BITS: constexpr, KIND: constexpr,
    GROUP: constexpr, RUN: constexpr, POWERS: constexpr, W0: constexpr, W1: constexpr, W2: constexpr,
    W3: constexpr, BK: constexpr,
):  # fmt: skip
    """Add the products of the inputs [first, first + BK) to the totals [BN, BM] of outputs and rows."""
    if BITS == 16:
        k = first + tl.arange(0, BK)
        numbers = tl.load(matrix + k[None, :], mask=there[:, None] & (k < inputs)[None, :], other=0.0)
        x = _inputs(x_ptr, row, held, first, inputs, x_stride, BK)
        total = tl.dot(numbers, x, total, input_precision="ieee")
    else:
        scale, minimum, zero = _of_group(  # pyright: ignore
            scales_ptr, minimums_ptr, factors_ptr, low_factors_ptr, offsets_ptr, first // GROUP, n, there,
            outputs, ZERO, RUN, POWERS,
        )  # fmt: skip
        if BITS == 8:
            at = matrix + (first + tl.arange(0, BK))[None, :]
            code = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
            x = _inputs(x_ptr, row, held, first, inputs, x_stride, BK)
            numbers = _numbers(code, zero, KIND, W0, W1, W2, W3).to(x.dtype)
            product = tl.dot(numbers, x, input_precision="ieee")
            added = tl.sum(x.to(tl.float32), 0)
        else:
            at = matrix + (first // 2 + tl.arange(0, BK // 2))[None, :]
            code = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
            x = _inputs(x_ptr, row, held, first, inputs, x_stride, BK // 2)
            y = _inputs(x_ptr, row, held, first + BK // 2, inputs, x_stride, BK // 2)
            low = _numbers(code & 15, zero, KIND, W0, W1, W2, W3).to(x.dtype)
            high = _numbers(code >> 4, zero, KIND, W0, W1, W2, W3).to(x.dtype)
            product = tl.dot(high, y, tl.dot(low, x, input_precision="ieee"), input_precision="ieee")
            added = tl.sum(x.to(tl.float32), 0) + tl.sum(y.to(tl.float32), 0)
        total += product * scale[:, None]
        if minimums_ptr is not None:
            total += minimum[:, None] * added[None, :]
    return total


@triton.jit(do_not_specialize=["rows", "splits"])
def multiply(
    x_ptr, codes_ptr, scales_ptr, minimums_ptr, factors_ptr, low_factors_ptr, offsets_ptr, bias_ptr, out_ptr,
    pairs_ptr, experts_ptr, x_stride, rows, outputs, inputs, width, expert_bytes, splits, ZERO: constexpr,
    BITS: constexpr, KIND: constexpr, GROUP: constexpr, RUN: constexpr, POWERS: constexpr, W0: constexpr,
    W1: constexpr, W2: constexpr, W3: constexpr, CHOSEN: constexpr, BN: constexpr, BK: constexpr,
    BM: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Compute a tile of `rows` x `outputs`; SPLIT: of some of the inputs, for `join_splits`.

    With `pairs`, a block of rows is one of pairs of a token and one of its CHOSEN experts, -1 for none: each
    reads the row of its token, or with CHOSEN 1 its own, and `experts` says whose matrix a block takes.
    """
    n, lane = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    there, held = n < outputs, lane < rows
    if pairs_ptr is not None:
        expert = tl.load(experts_ptr + tl.program_id(1)).to(tl.int64)
        if expert < 0:
            return
        lane = tl.load(pairs_ptr + lane)
        held = lane >= 0
        codes_ptr, scales_ptr, minimums_ptr, factors_ptr, low_factors_ptr, offsets_ptr = _matrix_of(  # pyright: ignore
            expert, expert_bytes, codes_ptr, scales_ptr, minimums_ptr, factors_ptr, low_factors_ptr,
            offsets_ptr, BITS, RUN,
        )  # fmt: skip
        if bias_ptr is not None:
            bias_ptr += expert * outputs
    lane = tl.where(held, lane, 0).to(tl.int64)
    row = lane // CHOSEN
    tiles = tl.cdiv(inputs, BK)
    each = tl.cdiv(tiles, splits)
    start = tl.program_id(2) * each
    matrix = codes_ptr + n.to(tl.int64)[:, None] * width
    total = tl.zeros([BN, BM], tl.float32)
    for tile in range(start, tl.minimum(start + each, tiles)):
        total = _add_tile(
            total, matrix, n, there, tile * BK, x_ptr, row, held, inputs, x_stride, scales_ptr, minimums_ptr,
            factors_ptr, low_factors_ptr, offsets_ptr, outputs, ZERO, BITS, KIND, GROUP, RUN, POWERS, W0, W1,
            W2, W3, BK,
        )  # fmt: skip
    if SPLIT:
        lane += tl.program_id(2).to(tl.int64) * rows
    elif bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=there, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + lane[None, :] * outputs + n[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=there[:, None] & held[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def join_splits(partial_ptr, bias_ptr, out_ptr, rows, outputs, splits, BLOCK: constexpr):
    """Add the splits [splits, rows, outputs] of a piece [BLOCK] of a row, in their order, and the bias."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(partial_ptr + (row + split * rows) * outputs + n, mask=there, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + n, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["first", "rows"])
def widen_rows(
    ids_ptr, codes_ptr, scales_ptr, minimums_ptr, factors_ptr, low_factors_ptr, offsets_ptr, out_ptr, first,
    rows, outputs, inputs, width, ZERO: constexpr, BITS: constexpr, KIND: constexpr, GROUP: constexpr,
    RUN: constexpr, POWERS: constexpr, W0: constexpr, W1: constexpr, W2: constexpr, W3: constexpr,
    BN: constexpr, BK: constexpr,
):  # fmt: skip
    """Widen a tile [BN, BK] of some rows: those that `ids` names, or those from the row `first` on."""
    lane = tl.program_id(0) * BN + tl.arange(0, BN)
    held = lane < rows
    n = first + lane
    if ids_ptr is not None:
        n = tl.load(ids_ptr + lane, mask=held, other=0)
    start = tl.program_id(1) * BK
    scale, minimum, zero = _of_group(  # pyright: ignore
        scales_ptr, minimums_ptr, factors_ptr, low_factors_ptr, offsets_ptr, start // GROUP, n, held, outputs,
        ZERO, RUN, POWERS,
    )  # fmt: skip
    matrix, out = codes_ptr + n.to(tl.int64)[:, None] * width, out_ptr + lane.to(tl.int64)[:, None] * inputs
    if BITS == 8:
        k = start + tl.arange(0, BK)
        code = tl.load(matrix + k[None, :], mask=held[:, None], other=0).to(tl.int32)
        plain = _numbers(code, zero, KIND, W0, W1, W2, W3) * scale[:, None] + minimum[:, None]
        tl.store(
            out + k[None, :], plain.to(out_ptr.dtype.element_ty), mask=held[:, None] & (k < inputs)[None, :]
        )
    else:
        half: constexpr = BK // 2
        k = start + tl.arange(0, half)
        code = tl.load(matrix + (start // 2 + tl.arange(0, half))[None, :], mask=held[:, None], other=0)
        code = code.to(tl.int32)
        low = _numbers(code & 15, zero, KIND, W0, W1, W2, W3) * scale[:, None] + minimum[:, None]
        high = _numbers(code >> 4, zero, KIND, W0, W1, W2, W3) * scale[:, None] + minimum[:, None]
        tl.store(
            out + k[None, :], low.to(out_ptr.dtype.element_ty), mask=held[:, None] & (k < inputs)[None, :]
        )
        k += half
        tl.store(
            out + k[None, :], high.to(out_ptr.dtype.element_ty), mask=held[:, None] & (k < inputs)[None, :]
        )
