"""Products of up to eight rows in Triton, with what comes before and behind them in the same kernel.

A program multiplies rows by some outputs [BN] of a plain matrix and some of its inputs. It writes its part of
the sums in float32, and counts itself. The last program of those that share an output adds their parts up,
in the order of the inputs whoever came last, and does what follows: so sums have the same bits in each run,
and no kernel follows for them. Counters are 0 before and behind each kernel.

Norms before a product are computed by each program anew: rows are short beside the part of the matrix that
it reads. What is rounded between the operations that are joined here is rounded as they round it.

With DEPENDENT, kernels begin while the one before still runs: they ask for their part of the matrix, which
depends on nothing, and wait for the end of that kernel before they touch anything else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import constexpr
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.kernels.cuda.fused.arrivals import is_last
from worker.kernels.cuda.linear import let_through
from worker.kernels.cuda.rotary import fitted, prepared

_LINE: constexpr = constexpr(128)
"""The bytes that memory is read by."""
_NORMED: constexpr = constexpr(4096)
"""The numbers of rows that a norm reads at a time."""


@triton.jit
def _ask_for(places):
    """Have numbers brought into the cache of the second level, [N, M] addresses of a line each."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def _factors(x_ptr, rows, inputs, eps, ROWS: constexpr, ALONE: constexpr):
    """What an RMS norm multiplies each row [ROWS] with; ALONE: there is one row, so all are its."""
    count: constexpr = 1 if ALONE else ROWS  # pyright: ignore[reportAssignmentType]
    block: constexpr = _NORMED // count
    row, squares = tl.arange(0, count), tl.zeros([count], tl.float32)
    for start in range(0, inputs, block):
        at = start + tl.arange(0, block)
        there = (row < rows)[:, None] & (at < inputs)[None, :]
        x = tl.load(x_ptr + row[:, None] * inputs + at[None, :], mask=there, other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
    return 1.0 / tl.sqrt(squares / inputs + eps)


@triton.jit
def multiplied(
    x_ptr, norm_ptr, weight_ptr, n, there, rows, inputs, eps, SPLITS: constexpr, ROWS: constexpr,
    ALONE: constexpr, K: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    """This split's part of rows [ROWS, inputs] times outputs `n` [BN] -> [BN, ROWS] in float32."""
    split, tiles = tl.program_id(1), tl.cdiv(inputs, K)
    start = tiles * split // SPLITS
    stop = tiles * (split + 1) // SPLITS
    matrix = weight_ptr + tl.where(there, n, 0).to(tl.int64)[:, None] * inputs
    if DEPENDENT:
        each: constexpr = _LINE // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        for tile in range(start, stop):
            k = tile * K + each * tl.arange(0, K // each)[None, :]
            _ask_for(matrix + tl.where(k < inputs, k, 0))
        gdc_wait()
    row = tl.arange(0, ROWS)
    held = row < rows
    if norm_ptr is not None:
        factors = _factors(x_ptr, rows, inputs, eps, ROWS, ALONE)
    total = tl.zeros([n.shape[0], ROWS], tl.float32)
    for tile in range(start, stop):
        k = tile * K + tl.arange(0, K)
        known = k < inputs
        numbers = tl.load(matrix + k[None, :], mask=there[:, None] & known[None, :], other=0.0)
        x = tl.load(
            x_ptr + row[None, :] * inputs + k[:, None], mask=known[:, None] & held[None, :], other=0.0
        )
        if norm_ptr is not None:
            weight = tl.load(norm_ptr + k, mask=known, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * factors[None, :] * weight[:, None]).to(numbers.dtype)
        total = tl.dot(numbers, x, total, input_precision="ieee")
    if DEPENDENT:
        gdc_launch_dependents()
    return total


@triton.jit
def _keep(partial_ptr, total, n, there, rows, width, ROWS: constexpr):
    """Write this split's part of the sums [BN, ROWS] to [splits, rows, width]."""
    row = tl.arange(0, ROWS)
    at = partial_ptr + (tl.program_id(1) * rows + row)[None, :].to(tl.int64) * width + n[:, None]
    tl.store(at, total, mask=there[:, None] & (row < rows)[None, :])


@triton.jit
def _summed(
    partial_ptr, bias_ptr, n, there, rows, width, SPLITS: constexpr, ROWS: constexpr, dtype: constexpr
):
    """The sums [BN, ROWS] of all splits and the bias, rounded."""
    row = tl.arange(0, ROWS)
    known = there[:, None] & (row < rows)[None, :]
    total = tl.zeros([n.shape[0], ROWS], tl.float32)
    for split in tl.static_range(SPLITS):  # so that no load waits for another one
        at = partial_ptr + (split * rows + row)[None, :].to(tl.int64) * width + n[:, None]
        total += tl.load(at, mask=known, other=0.0, cache_modifier=".cg")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=there, other=0.0).to(tl.float32)[:, None]
    return total.to(dtype)


@triton.jit(do_not_specialize=["rows"])
def add_product(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr, rows, inputs, outputs,
    SPLITS: constexpr, ROWS: constexpr, BN: constexpr, K: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    """Multiply rows by BN outputs, and add the results to the residual [rows, outputs]."""
    n, row = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, ROWS)
    there = n < outputs
    total = multiplied(
        x_ptr, None, weight_ptr, n, there, rows, inputs, 0.0, SPLITS, ROWS, False, K, DEPENDENT
    )
    _keep(partial_ptr, total, n, there, rows, outputs, ROWS)
    if is_last(counters_ptr + tl.program_id(0), SPLITS):
        dtype: constexpr = out_ptr.dtype.element_ty
        total = _summed(partial_ptr, bias_ptr, n, there, rows, outputs, SPLITS, ROWS, dtype).to(tl.float32)
        at, known = row[None, :] * outputs + n[:, None], there[:, None] & (row < rows)[None, :]
        total += tl.load(residual_ptr + at, mask=known, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, total.to(dtype), mask=known)


@triton.jit(do_not_specialize=["rows"])
def project_gates(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, counters_ptr, rows, inputs, width, eps,
    FUNCTION: constexpr, SPLITS: constexpr, ROWS: constexpr, ALONE: constexpr, BN: constexpr, K: constexpr,
    DEPENDENT: constexpr,
):  # fmt: skip
    """Multiply normalised rows by BN / 2 gates and ups, which lie `width` further, and apply the gates."""
    made: constexpr = BN // 2
    number, row = tl.arange(0, BN), tl.arange(0, ROWS)
    at = tl.program_id(0) * made + number % made
    n, there = at + number // made * width, at < width
    total = multiplied(
        x_ptr, norm_ptr, weight_ptr, n, there, rows, inputs, eps, SPLITS, ROWS, ALONE, K, DEPENDENT
    )
    _keep(partial_ptr, total, n, there, rows, 2 * width, ROWS)
    if is_last(counters_ptr + tl.program_id(0), SPLITS):
        dtype: constexpr = out_ptr.dtype.element_ty
        own = tl.program_id(0) * made + tl.arange(0, made)
        inner = own < width
        gate = _summed(partial_ptr, bias_ptr, own, inner, rows, 2 * width, SPLITS, ROWS, dtype)
        up = _summed(partial_ptr, bias_ptr, own + width, inner, rows, 2 * width, SPLITS, ROWS, dtype)
        out = let_through(gate.to(tl.float32), up.to(tl.float32), FUNCTION)
        known = inner[:, None] & (row < rows)[None, :]
        tl.store(out_ptr + row[None, :] * width + own[:, None], out.to(dtype), mask=known)


@triton.jit
def _place_head(
    partial_ptr, bias_ptr, projected_ptr, out_ptr, keys_ptr, values_ptr, slots_ptr, angles_ptr, q_norm_ptr,
    k_norm_ptr, head, rows, eps, k_scale, v_scale, QUERIES: constexpr, KEYS: constexpr, DIM: constexpr,
    WIDE: constexpr, PAGE: constexpr, ROTATED: constexpr, MOST: constexpr, SPLITS: constexpr, ROWS: constexpr,
):  # fmt: skip
    """Add up the parts of one head of all rows, and prepare it as `rotary.prepare_and_cache` does.

    It lies in `projected` [rows, heads * DIM] between the two.
    """
    width: constexpr = (QUERIES + 2 * KEYS) * DIM
    dtype: constexpr = out_ptr.dtype.element_ty
    column, dim = tl.arange(0, ROWS)[None, :], tl.arange(0, WIDE)
    n, there = head * DIM + dim, dim < DIM
    summed = _summed(partial_ptr, bias_ptr, n, there, rows, width, SPLITS, ROWS, dtype)
    at = projected_ptr + column * width + n[:, None]
    tl.store(at, summed, mask=there[:, None] & (column < rows))
    tl.debug_barrier()  # other threads read what these have written
    row, dims = tl.arange(0, ROWS)[:, None], dim[None, :]
    held = row < rows
    row = tl.where(held, row, 0)  # others have no angles
    known, x_ptr = held & (dims < DIM), projected_ptr + row * width + head * DIM
    normed: constexpr = q_norm_ptr is not None
    if head < QUERIES:
        x = prepared(x_ptr, held, q_norm_ptr, angles_ptr, row, eps, DIM, WIDE, ROTATED, normed)
        tl.store(out_ptr + (row * QUERIES + head) * DIM + dims, x.to(dtype), mask=known)
    else:
        slot = tl.load(slots_ptr + row, mask=held, other=0)
        if head < QUERIES + KEYS:
            place = ((slot // PAGE * KEYS + head - QUERIES) * PAGE + slot % PAGE) * DIM + dims
            x = prepared(x_ptr, held, k_norm_ptr, angles_ptr, row, eps, DIM, WIDE, ROTATED, normed)
            x = fitted(x, k_scale, MOST)
            tl.store(keys_ptr + place, x.to(keys_ptr.dtype.element_ty), mask=known)
        else:
            place = ((slot // PAGE * KEYS + head - QUERIES - KEYS) * PAGE + slot % PAGE) * DIM + dims
            x = prepared(x_ptr, held, None, None, row, eps, DIM, WIDE, 0, False)
            x = fitted(x, v_scale, MOST)
            tl.store(values_ptr + place, x.to(values_ptr.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["rows"])
def project_heads(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, projected_ptr, partial_ptr, counters_ptr, out_ptr, keys_ptr,
    values_ptr, slots_ptr, angles_ptr, q_norm_ptr, k_norm_ptr, rows, inputs, eps, head_eps, k_scale, v_scale,
    QUERIES: constexpr, KEYS: constexpr, DIM: constexpr, WIDE: constexpr, PAGE: constexpr,
    ROTATED: constexpr, MOST: constexpr, SPLITS: constexpr, ROWS: constexpr, ALONE: constexpr,
    BN: constexpr, K: constexpr, DEPENDENT: constexpr,
):  # fmt: skip
    """Normalise rows and multiply them by BN outputs of one head; the last program prepares the head.

    The heads of queries come first, then keys, then values.
    """
    tiles: constexpr = (DIM + BN - 1) // BN
    width: constexpr = (QUERIES + 2 * KEYS) * DIM
    head = tl.program_id(0) // tiles
    place = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    total = multiplied(
        x_ptr, norm_ptr, weight_ptr, head * DIM + place, place < DIM, rows, inputs, eps, SPLITS, ROWS, ALONE,
        K, DEPENDENT,
    )  # fmt: skip
    _keep(partial_ptr, total, head * DIM + place, place < DIM, rows, width, ROWS)
    if is_last(counters_ptr + head, tiles * SPLITS):
        _place_head(
            partial_ptr, bias_ptr, projected_ptr, out_ptr, keys_ptr, values_ptr, slots_ptr, angles_ptr,
            q_norm_ptr, k_norm_ptr, head, rows, head_eps, k_scale, v_scale, QUERIES, KEYS, DIM, WIDE, PAGE,
            ROTATED, MOST, SPLITS, ROWS,
        )  # fmt: skip
