"""Rows of inputs are rounded to e4m3 in Triton, for products of numbers of 8 bits on both sides."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr

GROUP = 128
"""The inputs of a row that share a scale, where matrices have groups."""
LARGEST = 448.0
"""The largest number that e4m3 holds."""
LEAST_SCALE = 1e-12
"""The scale of what is zero throughout."""
_GROUP: constexpr = constexpr(GROUP)
_LARGEST: constexpr = constexpr(LARGEST)
_LEAST_SCALE: constexpr = constexpr(LEAST_SCALE)


@triton.jit
def _scale_of(largest):
    return tl.maximum(largest / _LARGEST, _LEAST_SCALE)


@triton.jit
def _rounded(x, scale, numbers_ptr):
    """Numbers divided by their scale, of the type to which `numbers_ptr` points."""
    y = x / scale
    y = tl.where(y > _LARGEST, _LARGEST, tl.where(y < -_LARGEST, -_LARGEST, y))
    return y.to(numbers_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["filled"])
def round_rows(
    x_ptr, scale_ptr, numbers_ptr, scales_ptr, width, filled, x_stride, inputs, GROUPED: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Round a row of any width, or BLOCK columns of it if groups of its inputs have scales of their own.

    It is filled up with zeros to `width`. Scales lie group by group, `filled` from one to the next. With
    `scale`, all rows have this one, and what is too large for it becomes the largest number.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    numbers_ptr += row * width
    columns = tl.arange(0, BLOCK)
    if GROUPED:
        piece = tl.program_id(1)
        at = piece * BLOCK + columns
        x = tl.load(x_ptr + at, mask=at < inputs, other=0.0).to(tl.float32)
        x = tl.reshape(x, [BLOCK // _GROUP, _GROUP])
        scale = _scale_of(tl.max(tl.abs(x), 1))
        group = piece * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
        tl.store(scales_ptr + group.to(tl.int64) * filled + row, scale, mask=group * _GROUP < width)
        numbers = tl.reshape(_rounded(x, scale[:, None], numbers_ptr), [BLOCK])
        tl.store(numbers_ptr + at, numbers, mask=at < width)
    else:
        if scale_ptr is not None:
            scale = tl.load(scale_ptr)
        else:
            largest = tl.zeros([BLOCK], tl.float32)
            for start in range(0, inputs, BLOCK):
                x = tl.load(x_ptr + start + columns, mask=start + columns < inputs, other=0.0)
                largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
            scale = _scale_of(tl.max(largest, 0))
        tl.store(scales_ptr + row, scale)
        for start in range(0, width, BLOCK):
            at = start + columns
            x = tl.load(x_ptr + at, mask=at < inputs, other=0.0).to(tl.float32)
            tl.store(numbers_ptr + at, _rounded(x, scale, numbers_ptr), mask=at < width)
