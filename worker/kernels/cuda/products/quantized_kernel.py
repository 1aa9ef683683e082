"""Products with quantized matrices in Triton: one kernel for all forms, and one that widens rows.

A program computes a tile [BN, BM] of the product: so many outputs of so many rows. The matrix is the left
side of it, so a few rows fill up the narrow side of the matrix unit. It takes the inputs in tiles. A tile, or
with codes of 4 bits each half of it, lies within one group: numbers are whole or short, so they are exact in
16 bits, and a sum over inputs that share a scale is scaled once, in float32.

Codes of 4 bits lie two in a byte: that of a column in the first half of a tile, and above it that of the
column as far into the second half. A code becomes a byte b, then the float32 with the bits of 2^23 + b, from
which 2^23 and the byte that means 0 are taken away: no instruction that converts whole numbers is needed.
Whole numbers of 4 bits become numbers of 16 bits likewise, from the bits of 128 + b or 1,024 + b, two by an
instruction. Those of e2m1 are the bits of a number whose exponent is too small. If scales are powers of 2,
they are part of what is missing there, and sums need no scale. PTX of our own makes all these: four numbers
of two bytes by 6 or 9 instructions, where the compiler takes 11 and 24.
"""

# Triton hands a NamedTuple to a kernel as it is.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language import constexpr

from worker.kernels.cuda.capabilities import FEW_ROWS

WHOLE, E4M3, LEVELS, HALVES = 0, 1, 2, 3
_INTERPRETED: constexpr = constexpr(knobs.runtime.interpret)
_FEW_ROWS: constexpr = constexpr(FEW_ROWS)
_2_TO_63: constexpr = constexpr(2.0**63)
_2_TO_126: constexpr = constexpr(2.0**126)
"""The kinds of codes: whole numbers, numbers of 8 bits, 16 levels, and 16 levels in units of a half."""
_WHOLE: constexpr = constexpr(WHOLE)
_E4M3: constexpr = constexpr(E4M3)
_LEVELS: constexpr = constexpr(LEVELS)
_HALVES: constexpr = constexpr(HALVES)


class MatrixForm(NamedTuple):
    """The constants of a compiled variant: the form in which a matrix is stored."""

    zero: int  # the byte that means 0 where there are no offsets
    bits: int  # of a code; 16 for numbers that are not codes
    kind: int
    group: int  # columns that share a scale
    run: int  # groups that share factors; 0 for none
    powers: bool  # whether scales are exponents of 2
    levels: tuple[int, ...]  # the 16 levels as bytes, four in a word
    tile: int  # columns of a tile
    scaled: bool = False  # whether scales are in the numbers, so that sums need none


class MatrixParts(NamedTuple):
    """The tensors of a matrix: codes [outputs, ...], and what each group has [groups, outputs]."""

    codes: Tensor
    scales: Tensor | None
    minimums: Tensor | None
    factors: Tensor | None  # of the scales of a run of groups
    low_factors: Tensor | None  # of its minimums
    offsets: Tensor | None


@triton.jit
def _numbers(code, zero, FORM: constexpr):
    """What codes [BN, K] int32 mean, without their scales, in float32; `zero` [BN, 1] means 0."""
    if FORM.kind == _E4M3:
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: exponents are counted anew
        return tl.where((code & 127) == 127, float("nan"), number)
    if FORM.kind >= _LEVELS:
        high = tl.where((code & 4) != 0, FORM.levels[3], FORM.levels[2])
        low = tl.where((code & 4) != 0, FORM.levels[1], FORM.levels[0])
        word = tl.where((code & 8) != 0, high, low)
        code = (word >> ((code & 3) * 8)) & 255
    if FORM.kind == _HALVES:
        return (code | 0x4A800000).to(tl.float32, bitcast=True) - (4194304.0 + zero * 0.5)
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)


def _whole_pairs(type: str, raised: str, one: str) -> constexpr:
    """PTX for two bytes of whole numbers of 4 bits, each or-ed into a number whose last place is worth 1."""
    return constexpr(f"""{{
    .reg .b32 pair, low, high, one;
    mov.b32 one, {one};
    prmt.b32 pair, $2, 0, 0x4140;
    lop3.b32 low, pair, 0x000F000F, {raised}, 0xEA;
    shr.b32 high, pair, 4;
    lop3.b32 high, high, 0x000F000F, {raised}, 0xEA;
    fma.rn.{type} $0, low, one, $3;
    fma.rn.{type} $1, high, one, $3;
    }}""")


_WHOLE_BFLOAT16 = _whole_pairs("bf16x2", "0x43004300", "0x3F803F80")
_WHOLE_FLOAT16 = _whole_pairs("f16x2", "0x64006400", "0x3C003C00")
_FLOAT_BFLOAT16 = constexpr("""{
    .reg .b32 pair, low, high, none;
    mov.b32 none, 0x80008000;
    prmt.b32 pair, $2, 0, 0x4140;
    and.b32 low, pair, 0x000F000F;
    mul.lo.u32 low, low, 0x1040;
    and.b32 low, low, 0x81C081C0;
    and.b32 high, pair, 0x00F000F0;
    mul.lo.u32 high, high, 0x104;
    and.b32 high, high, 0x81C081C0;
    fma.rn.bf16x2 $0, low, $3, none;
    fma.rn.bf16x2 $1, high, $4, none;
    }""")
"""PTX for two bytes of e2m1: a product moves the sign of a code to its place, and the other bits to those
of the last of an exponent and the first behind it. The last operands have what is missing in the exponent."""


@triton.jit
def _floats_of_4_bits(code, unit, dtype: constexpr):
    """What codes [BN, K] of e2m1 mean in units of `unit` [BN, 1] / 2^126, for many rows."""
    bits = ((code & 7) << 6) | ((code & 8) << 12)
    return (bits.to(tl.bfloat16, bitcast=True) * unit).to(dtype)


@triton.jit
def _numbers_of_4_bits(code, zero, x, FORM: constexpr):
    """What the lower and the upper halves of bytes [BN, K] mean, without their scales, in the type of `x`."""
    wide: constexpr = x.dtype == tl.float32
    if _INTERPRETED or wide or FORM.kind == _LEVELS:
        code = code.to(tl.int32)
        low = _numbers(code & 15, zero, FORM).to(x.dtype)
        high = _numbers(code >> 4, zero, FORM).to(x.dtype)
    elif FORM.kind == _WHOLE:
        brain: constexpr = x.dtype == tl.bfloat16
        ptx: constexpr = _WHOLE_BFLOAT16 if brain else _WHOLE_FLOAT16
        zero = ((-128.0 if brain else -1024.0) - zero).to(x.dtype)
        low, high = tl.inline_asm_elementwise(ptx, "=r,=r,r,r", [code, zero], (x.dtype, x.dtype), True, 2)
    else:
        unit = tl.full([1, 1], _2_TO_126, tl.float32).to(tl.bfloat16)
        low, high = _floats(code, unit, unit, x, FORM)  # pyright: ignore
    return low, high


@triton.jit
def _floats(code, unit, other, x, FORM: constexpr):
    """What the lower and the upper halves of bytes [BN, K] of e2m1 mean, in units of `unit` / 2^126 and of
    `other` / 2^126 [BN, 1], in the type of `x`."""
    if _INTERPRETED:  # which knows no products of bfloat16
        code = code.to(tl.int32)
        low = (_numbers(code & 15, FORM.zero, FORM) * (unit.to(tl.float32) / _2_TO_126)).to(x.dtype)
        high = (_numbers(code >> 4, FORM.zero, FORM) * (other.to(tl.float32) / _2_TO_126)).to(x.dtype)
    elif x.shape[1] > _FEW_ROWS or x.dtype != tl.bfloat16:
        # PTX of our own took an H100 1.3 times as long with many rows.
        code = code.to(tl.int16)
        low, high = _floats_of_4_bits(code & 15, unit, x.dtype), _floats_of_4_bits(code >> 4, other, x.dtype)
    else:
        given = [code, unit, other]
        low, high = tl.inline_asm_elementwise(
            _FLOAT_BFLOAT16, "=r,=r,r,r,r", given, (x.dtype, x.dtype), True, 2
        )
    return low, high


@triton.jit
def _unit_of_group(parts, skipped, group, n, there, outputs):
    """The scale [BN, 1] of one group of numbers of e2m1, which is a power of 2, and 2^63 times too large."""
    exponent = _load(parts.scales, skipped, group * outputs + n, there).to(tl.int32)
    return (tl.minimum(exponent + 63, 254) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit
def _load(part, skipped, place, there):
    """Numbers of a part of the matrix that lies so many bytes behind the first one."""
    at = part + skipped // (part.dtype.element_ty.primitive_bitwidth // 8) + place
    return tl.load(at, mask=there, other=0)


@triton.jit
def _of_group(parts, skipped, group, n, there, outputs, FORM: constexpr):
    """The scale, the minimum and the code of zero [BN] of one group, in float32."""
    place = group * outputs + n
    scale = _load(parts.scales, skipped, place, there)
    if FORM.powers:
        scale = tl.maximum(scale.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    else:
        scale = scale.to(tl.float32)
    minimum = tl.zeros_like(scale)
    if parts.minimums is not None:
        minimum = _load(parts.minimums, skipped, place, there).to(tl.float32)
    if FORM.run > 0:
        run = group // FORM.run * outputs + n
        scale *= _load(parts.factors, skipped, run, there).to(tl.float32)
        if parts.minimums is not None:
            minimum *= _load(parts.low_factors, skipped, run, there).to(tl.float32)
    zero = tl.zeros_like(scale) + FORM.zero
    if parts.offsets is not None:
        zero = _load(parts.offsets, skipped, place, there).to(tl.float32)
    return scale, minimum, zero[:, None]


@triton.jit
def _inputs(x_ptr, row, held, first, inputs, x_stride, K: constexpr):
    """The inputs [K, BM] that begin with the column `first`, zero beyond the last."""
    k = first + tl.arange(0, K)
    mask = (k < inputs)[:, None] & held[None, :]
    return tl.load(x_ptr + row[None, :] * x_stride + k[:, None], mask=mask, other=0.0)


@triton.jit
def _group_of_half(first, inputs, FORM: constexpr):
    """The group of the second half of a tile, or the last group if no input is left for this half."""
    return tl.minimum(first + FORM.tile // 2, inputs - 1) // FORM.group


@triton.jit
def _add_scaled(total, product, scale, minimum, x, parts):
    """Add the products of inputs `x` that share a scale to the totals."""
    total += product * scale[:, None]
    if parts.minimums is not None:
        total += minimum[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
    return total


@triton.jit
def _add_floats(
    total, matrix, n, there, first, x_ptr, row, held, inputs, x_stride, parts, skipped, outputs,
    FORM: constexpr,
):  # fmt: skip
    """Add the products of one tile of inputs with numbers of e2m1 that have their scales in them."""
    half: constexpr = FORM.tile // 2
    code = tl.load(matrix + (first // 2 + tl.arange(0, half))[None, :], mask=there[:, None], other=0)
    x = _inputs(x_ptr, row, held, first, inputs, x_stride, half)
    y = _inputs(x_ptr, row, held, first + half, inputs, x_stride, half)
    unit = _unit_of_group(parts, skipped, first // FORM.group, n, there, outputs)
    other = _unit_of_group(parts, skipped, _group_of_half(first, inputs, FORM), n, there, outputs)
    low, high = _floats(code, unit, other, x, FORM)  # pyright: ignore
    total = tl.dot(low, x, total, input_precision="ieee")
    return tl.dot(high, y, total, input_precision="ieee")


@triton.jit
def add_tile(
    total, matrix, n, there, first, x_ptr, row, held, inputs, x_stride, parts, skipped, outputs,
    FORM: constexpr,
):  # fmt: skip
    """Add the products of one tile of inputs, from `first` on, to the totals [BN, BM] of outputs and rows."""
    tile: constexpr = FORM.tile
    if FORM.bits == 16:
        k = first + tl.arange(0, tile)
        numbers = tl.load(matrix + k[None, :], mask=there[:, None] & (k < inputs)[None, :], other=0.0)
        x = _inputs(x_ptr, row, held, first, inputs, x_stride, tile)
        total = tl.dot(numbers, x, total, input_precision="ieee")
    elif FORM.scaled:
        total = _add_floats(  # pyright: ignore
            total, matrix, n, there, first, x_ptr, row, held, inputs, x_stride, parts, skipped, outputs, FORM
        )
    else:
        scale, minimum, zero = _of_group(  # pyright: ignore
            parts, skipped, first // FORM.group, n, there, outputs, FORM
        )
        if FORM.bits == 8:
            at = matrix + (first + tl.arange(0, tile))[None, :]
            code = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
            x = _inputs(x_ptr, row, held, first, inputs, x_stride, tile)
            product = tl.dot(_numbers(code, zero, FORM).to(x.dtype), x, input_precision="ieee")
            total = _add_scaled(total, product, scale, minimum, x, parts)
        else:
            half: constexpr = FORM.tile // 2
            at = matrix + (first // 2 + tl.arange(0, half))[None, :]
            code = tl.load(at, mask=there[:, None], other=0)
            x = _inputs(x_ptr, row, held, first, inputs, x_stride, half)
            y = _inputs(x_ptr, row, held, first + half, inputs, x_stride, half)
            low, high = _numbers_of_4_bits(code, zero, x, FORM)  # pyright: ignore
            product = tl.dot(low, x, input_precision="ieee")
            if FORM.group % tile == 0:
                product = tl.dot(high, y, product, input_precision="ieee")
                total = _add_scaled(total, product, scale, minimum, x, parts)
                if parts.minimums is not None:
                    total += minimum[:, None] * tl.sum(y.to(tl.float32), 0)[None, :]
            else:
                total = _add_scaled(total, product, scale, minimum, x, parts)
                scale, minimum, zero = _of_group(  # pyright: ignore
                    parts, skipped, _group_of_half(first, inputs, FORM), n, there, outputs, FORM
                )
                if parts.offsets is not None:
                    high = _numbers_of_4_bits(code, zero, y, FORM)[1]  # pyright: ignore
                product = tl.dot(high, y, input_precision="ieee")
                total = _add_scaled(total, product, scale, minimum, y, parts)
    return total


@triton.jit
def in_units(total, FORM: constexpr):
    """The totals that `add_tile` has made, in units of 1."""
    if FORM.scaled:
        total *= _2_TO_63
    return total


@triton.jit(do_not_specialize=["rows", "splits"])
def multiply(
    x_ptr, parts, bias_ptr, out_ptr, x_stride, rows, outputs, inputs, width, splits, FORM: constexpr,
    BN: constexpr, BM: constexpr, SPLIT: constexpr,
):  # fmt: skip
    """Compute a tile of `rows` x `outputs`; SPLIT: of some of the inputs, for `join_splits`."""
    n, lane = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    there, held = n < outputs, lane < rows
    lane = tl.where(held, lane, 0).to(tl.int64)
    tiles = tl.cdiv(inputs, FORM.tile)
    each = tl.cdiv(tiles, splits)
    start = tl.program_id(2) * each
    matrix = parts.codes + n.to(tl.int64)[:, None] * width
    total = tl.zeros([BN, BM], tl.float32)
    for tile in range(start, tl.minimum(start + each, tiles)):
        total = add_tile(
            total, matrix, n, there, tile * FORM.tile, x_ptr, lane, held, inputs, x_stride, parts, 0, outputs,
            FORM,
        )  # fmt: skip
    total = in_units(total, FORM)  # pyright: ignore
    if SPLIT:
        lane += tl.program_id(2).to(tl.int64) * rows
    elif bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=there, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + lane[None, :] * outputs + n[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=there[:, None] & held[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def join_splits(
    partial_ptr, bias_ptr, out_ptr, rows, outputs, splits, MOST: constexpr, BLOCK: constexpr
):  # fmt: skip
    """Add the splits [splits, rows, outputs] of a piece [BLOCK] of a row, in their order, and the bias."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = n < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(MOST):  # so that no load waits for another one
        at = partial_ptr + (row + split * rows) * outputs + n
        total += tl.load(at, mask=there & (split < splits), other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + n, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _store_widened(out, code, k, held, inputs, scale, minimum, zero, FORM: constexpr):
    """Store the numbers that codes mean in the columns `k` of rows [BN] that begin at `out`."""
    plain = _numbers(code, zero, FORM) * scale[:, None] + minimum[:, None]
    there = held[:, None] & (k < inputs)[None, :]
    tl.store(out + k[None, :], plain.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["first", "rows"])
def widen_rows(
    ids_ptr, parts, out_ptr, first, rows, outputs, inputs, width, FORM: constexpr, BN: constexpr
):  # fmt: skip
    """Widen a tile of BN rows: those that `ids` names, or those from the row `first` on."""
    lane = tl.program_id(0) * BN + tl.arange(0, BN)
    held = lane < rows
    n = first + lane
    if ids_ptr is not None:
        n = tl.load(ids_ptr + lane, mask=held, other=0)
    start = tl.program_id(1) * FORM.tile
    scale, minimum, zero = _of_group(parts, 0, start // FORM.group, n, held, outputs, FORM)  # pyright: ignore
    matrix = parts.codes + n.to(tl.int64)[:, None] * width
    out = out_ptr + lane.to(tl.int64)[:, None] * inputs
    if FORM.bits == 8:
        k = start + tl.arange(0, FORM.tile)
        code = tl.load(matrix + k[None, :], mask=held[:, None], other=0).to(tl.int32)
        _store_widened(out, code, k, held, inputs, scale, minimum, zero, FORM)
    else:
        half: constexpr = FORM.tile // 2
        k = tl.arange(0, half)
        code = tl.load(matrix + (start // 2 + k)[None, :], mask=held[:, None], other=0).to(tl.int32)
        _store_widened(out, code & 15, start + k, held, inputs, scale, minimum, zero, FORM)
        if FORM.group % FORM.tile != 0:
            scale, minimum, zero = _of_group(  # pyright: ignore
                parts, 0, _group_of_half(start, inputs, FORM), n, held, outputs, FORM
            )
        _store_widened(out, code >> 4, start + half + k, held, inputs, scale, minimum, zero, FORM)
