"""The work on heads between projections and attention, by Triton: `rotary_and_cache`, `rotate`, `angles`.

A program prepares some heads of one token: norm, rotation, and their places in the cache, so that queries and
keys are read once and written once, 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.context import ForwardContext
from models.ops import reference
from models.ops.attention_inputs import AS_PROJECTED, CACHE_DTYPES, UNSCALED, CacheScales, HeadPrep
from worker.kernels.cuda.attention import fits
from worker.kernels.cuda.attention_plan import Heads
from worker.kernels.cuda.launch import joined, launch, padded, power_of_2

_NUMBERS = 1024
"""The numbers of the heads that a program prepares, if a token has so many."""


@triton.jit
def prepared(
    x_ptr, known, norm_ptr, angles_ptr, token, eps, DIM: constexpr, WIDE: constexpr, ROTATED: constexpr,
    NORMED: constexpr,
):  # fmt: skip
    """Some heads [H, WIDE] of a token in float32, normalised and rotated; pair i is i and i + ROTATED / 2.

    They begin at `x_ptr` [H, 1], if they are `known` [H, 1].
    """
    dims = tl.arange(0, WIDE)[None, :]
    there = dims < DIM
    x = tl.load(x_ptr + dims, mask=known & there, other=0.0).to(tl.float32)
    factor = 1.0
    if NORMED:
        factor = (1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps))[:, None]
        x = x * factor * tl.load(norm_ptr + dims, mask=there, other=0.0).to(tl.float32)
    if ROTATED > 0:
        half: constexpr = ROTATED // 2
        turned = dims < ROTATED
        partner = tl.where(dims < half, dims + half, dims - half)
        other = tl.load(x_ptr + partner, mask=known & turned, other=0.0).to(tl.float32)
        if NORMED:
            other = other * factor * tl.load(norm_ptr + partner, mask=turned, other=0.0).to(tl.float32)
        pair = angles_ptr + token * ROTATED + dims % half
        cosine = tl.load(pair, mask=turned, other=1.0)
        sine = tl.load(pair + half, mask=turned, other=0.0)
        x = x * cosine + tl.where(dims < half, -other, other) * sine
    return x


@triton.jit
def fitted(x, scale, MOST: constexpr):
    """Numbers divided by the scale, from -MOST to MOST, as the type of a cache holds them; NaN stays so."""
    if MOST > 0:
        x = x / scale
        x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    return x


@triton.jit
def prepare_and_cache(
    q_ptr, k_ptr, v_ptr, out_ptr, keys_ptr, values_ptr, slots_ptr, angles_ptr, q_norm_ptr, k_norm_ptr,
    v_norm_ptr, q_stride, k_stride, v_stride, eps, k_scale, v_scale, QUERIES: constexpr, KEYS: constexpr,
    DIM: constexpr, WIDE: constexpr, HEADS: constexpr, PAGE: constexpr, ROTATED: constexpr,
    NORMED: constexpr, VALUES_NORMED: constexpr, MOST: constexpr,
):  # fmt: skip
    """Prepare up to HEADS heads of one token: those of queries come first, then keys, then values.

    MOST is the largest number of a cache of 8 bits, where numbers are divided by scales; or 0.
    """
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    head, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDE)[None, :]
    queries: constexpr = (QUERIES + HEADS - 1) // HEADS * HEADS  # where keys begin
    keys: constexpr = (KEYS + HEADS - 1) // HEADS * HEADS
    if first < queries:
        head += first
        known = head < QUERIES
        x_ptr = q_ptr + token * q_stride + head * DIM
        x = prepared(x_ptr, known, q_norm_ptr, angles_ptr, token, eps, DIM, WIDE, ROTATED, NORMED)
        at = out_ptr + (token * QUERIES + head) * DIM + dims
        tl.store(at, x.to(out_ptr.dtype.element_ty), mask=known & (dims < DIM))
    else:
        slot = tl.load(slots_ptr + token)
        if first < queries + keys:
            head += first - queries
            known = head < KEYS
            place = ((slot // PAGE * KEYS + head) * PAGE + slot % PAGE) * DIM + dims
            x_ptr = k_ptr + token * k_stride + head * DIM
            x = prepared(x_ptr, known, k_norm_ptr, angles_ptr, token, eps, DIM, WIDE, ROTATED, NORMED)
            x = fitted(x, k_scale, MOST)
            tl.store(keys_ptr + place, x.to(keys_ptr.dtype.element_ty), mask=known & (dims < DIM))
        else:
            head += first - queries - keys
            known = head < KEYS
            place = ((slot // PAGE * KEYS + head) * PAGE + slot % PAGE) * DIM + dims
            x_ptr = v_ptr + token * v_stride + head * DIM
            x = prepared(x_ptr, known, v_norm_ptr, angles_ptr, token, eps, DIM, WIDE, 0, VALUES_NORMED)
            x = fitted(x, v_scale, MOST)
            tl.store(values_ptr + place, x.to(values_ptr.dtype.element_ty), mask=known & (dims < DIM))


@triton.jit
def turn(
    x_ptr, out_ptr, angles_ptr, norm_ptr, x_stride, eps, COUNT: constexpr, DIM: constexpr, WIDE: constexpr,
    HEADS: constexpr, ROTATED: constexpr, NORMED: constexpr,
):  # fmt: skip
    """Normalise and rotate up to HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head, dims = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, WIDE)[None, :]
    known = head < COUNT
    x_ptr += token * x_stride + head * DIM
    x = prepared(x_ptr, known, norm_ptr, angles_ptr, token, eps, DIM, WIDE, ROTATED, NORMED)
    at = out_ptr + (token * COUNT + head) * DIM + dims
    tl.store(at, x.to(out_ptr.dtype.element_ty), mask=known & (dims < DIM))


@triton.jit
def find_angles(positions_ptr, frequencies_ptr, out_ptr, pairs, scale, BLOCK: constexpr):
    """The cosines of a token's angles, and then the sines.

    Angles are brought within an eighth of a turn in float64; Triton's own functions keep a table in memory.
    """
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    frequency = tl.load(frequencies_ptr + at, mask=at < pairs, other=0.0)
    turned = (tl.load(positions_ptr + token).to(tl.float32) * frequency).to(tl.float64)
    quarters = tl.floor(turned * 0.6366197723675814 + 0.5)
    x = (turned - quarters * 1.5707963267948966).to(tl.float32)
    square, turns = x * x, quarters.to(tl.int64)
    sine = 8.3321608736e-3 + square * -1.9515295891e-4
    sine = x + x * square * (square * sine - 1.6666654611e-1)
    cosine = square * (square * 2.443315711809948e-5 - 1.388731625493765e-3) + 4.166664568298827e-2
    cosine = 1.0 - 0.5 * square + square * square * cosine
    odd, out = (turns & 1) != 0, out_ptr + token * 2 * pairs + at
    of_cosine = tl.where(((turns + 1) & 2) != 0, -scale, scale)
    of_sine = tl.where((turns & 2) != 0, -scale, scale)
    tl.store(out, tl.where(odd, sine, cosine) * of_cosine, mask=at < pairs)
    tl.store(out + pairs, tl.where(odd, cosine, sine) * of_sine, mask=at < pairs)


def heads_at_once(count: int, wide: int) -> tuple[int, int]:
    """How many of a token's heads a program prepares, and its warps, whose threads take 8 numbers each.

    Both are the same for any number of tokens, and so are the sums of norms.
    """
    heads = min(max(1, _NUMBERS // wide), power_of_2(count))
    return heads, max(1, heads * wide // 256)


def rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    context: ForwardContext,
    prep: HeadPrep = AS_PROJECTED,
    scales: CacheScales = UNSCALED,
) -> Tensor:
    heads, cos_sin = Heads(q.shape[1], k.shape[1], q.shape[2]), prep.cos_sin
    q_norm, k_norm = prep.q_norm, prep.k_norm
    normed = q_norm is not None and k_norm is not None
    weights = (q_norm, k_norm) if normed else ()
    if prep.v_norm is not None:
        weights = (*weights, prep.v_norm)
    if not (
        fits(heads, q, k, v)
        and kv.dtype in (q.dtype, *CACHE_DTYPES.values())
        and kv.is_contiguous()
        and (cos_sin is None or cos_sin.is_contiguous())
        and all(weight is not None and weight.is_contiguous() for weight in weights)
    ):
        return reference.rotary_and_cache(q, k, v, kv, context, prep, scales)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wide = padded(heads.dim)
    block, warps = heads_at_once(heads.queries, wide)
    launch(
        prepare_and_cache,
        (len(q), -(-heads.queries // block) + 2 * -(-heads.keys // block)),
        *(q, k, v, out, kv[0], kv[1], context.slot_mapping, cos_sin, q_norm, k_norm),
        *(prep.v_norm, q.stride(0), k.stride(0), v.stride(0), prep.eps, scales.keys, scales.values),
        *(heads.queries, heads.keys, heads.dim, wide, block, context.block_size),
        *(0 if cos_sin is None else cos_sin.shape[1], normed, prep.v_norm is not None),
        torch.finfo(kv.dtype).max if kv.dtype.itemsize == 1 else 0.0,
        num_warps=warps,
    )
    return out


def rotate(x: Tensor, cos_sin: Tensor | None, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    tokens, count, dim = x.shape
    contiguous = all(given is None or given.is_contiguous() for given in (cos_sin, norm))
    if not (fits(Heads(count, count, dim), x) and contiguous):
        return reference.rotate(x, cos_sin, norm, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, warps = heads_at_once(count, padded(dim))
    launch(
        turn,
        (tokens, -(-count // block)),
        *(x, out, cos_sin, norm, x.stride(0), eps, count, dim, padded(dim), block),
        *(0 if cos_sin is None else cos_sin.shape[1], norm is not None),
        num_warps=warps,
    )
    return out


def angles(positions: Tensor, frequencies: Tensor, scale: float, axes: Tensor | None = None) -> Tensor:
    if (
        joined() is None or axes is not None
    ):  # torch's five operations do as well where nothing waits for them
        return reference.angles(positions, frequencies, scale, axes)
    tokens, pairs = len(positions), len(frequencies)
    out = torch.empty(tokens, 2 * pairs, dtype=torch.float32, device=positions.device)
    block = padded(pairs)
    launch(find_angles, (tokens,), positions, frequencies, out, pairs, scale, block, num_warps=1)
    return out


OPERATIONS: dict[str, Callable[..., Any]] = {
    operation.__name__: operation for operation in (rotary_and_cache, rotate, angles)
}
"""The operations of this module by name, for `models.ops.use`."""
