"""Attention by the C kernels in `csrc`: `attention.c`, `encoder_attention.c`, `disentangled.c`, `rotary.c`.

The reference computes what the kernels cannot (float16, heads of odd sizes or apart in memory).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from models.context import ForwardContext
from models.ops import encoder_ops, reference
from models.ops.attention_inputs import AS_PROJECTED, CODES, UNSCALED, CacheScales, HeadPrep, stored_shape
from models.ops.encoder_ops import Distances
from worker.kernels.cpu.library import Kernel, Library
from worker.kernels.cpu.tensors import INT8, KINDS, address, empty, refuse

_MAX_DIM, _TILE = 512, 64
"""The widest head and the rows of a tile, as in `csrc/attention_tile.h`."""
_CACHED = {**KINDS, CODES: INT8}
"""The number types of caches."""


def bind(library: Library) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""
    return {
        "rotary_and_cache": partial(rotary_and_cache, library.function("rotary_and_cache", quick=True)),
        "rotate": partial(rotate, library.function("rotate", quick=True)),
        "attention": partial(attention, library.function("attention")),
        "encoder_attention": partial(encoder_attention, library.function("encoder_attention")),
        "disentangled_attention": partial(disentangled_attention, library.function("disentangled_attention")),
    }


def rotary_and_cache(
    run: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    context: ForwardContext,
    prep: HeadPrep = AS_PROJECTED,
    scales: CacheScales = UNSCALED,
) -> Tensor:
    cos_sin, q_norm, k_norm = prep.cos_sin, prep.q_norm, prep.k_norm
    v_norm = prep.v_norm
    if q_norm is None or k_norm is None:
        q_norm = k_norm = None
    _check_heads(q, k, v, kv, context)
    if cos_sin is not None:
        _check_rotation("rotary_and_cache", q, cos_sin)
    if q_norm is not None and k_norm is not None and not q_norm.shape == k_norm.shape == q.shape[2:]:
        refuse("rotary_and_cache", q=q, q_norm=q_norm, k_norm=k_norm)
    if v_norm is not None and (q_norm is None or v_norm.shape != q_norm.shape):
        refuse("rotary_and_cache", q=q, q_norm=q_norm, v_norm=v_norm)
    agree = _agree(q_norm, k_norm, q.dtype) and _agree(q_norm, v_norm, q.dtype)
    if not (agree and _fit(q, k, v) and _suits(kv, q) and _plain(cos_sin)):
        return reference.rotary_and_cache(q, k, v, kv, context, prep, scales)
    tokens, heads, dim = q.shape
    out = empty(q.shape, q.dtype)
    run(
        *(q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
        *(out.data_ptr(), kv.data_ptr(), *kv.shape[1:4], dim),
        *(context.slot_mapping.data_ptr(), *_angles(cos_sin)),
        *(address(q_norm), address(k_norm), address(v_norm), prep.eps),
        *(tokens, heads, KINDS[q.dtype], KINDS[q.dtype if q_norm is None else q_norm.dtype]),
        _CACHED[kv.dtype],
    )
    return out


def rotate(
    run: Kernel, x: Tensor, cos_sin: Tensor | None, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    if cos_sin is not None:
        _check_rotation("rotate", x, cos_sin)
    if norm is not None and norm.shape != x.shape[2:]:
        refuse("rotate", x=x, norm=norm)
    if not (_fit(x) and _plain(cos_sin) and _agree(norm, norm, x.dtype)):
        return reference.rotate(x, cos_sin, norm, eps)
    out, kind = empty(x.shape, x.dtype), KINDS[x.dtype]
    run(
        *(x.data_ptr(), x.stride(0), out.data_ptr(), *_angles(cos_sin), address(norm), eps),
        *(*x.shape, kind, kind if norm is None else KINDS[norm.dtype]),
    )
    return out


def attention(
    run: Kernel,
    q: Tensor,
    kv: Tensor,
    context: ForwardContext,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    last: Tensor | None = None,
    scales: CacheScales = UNSCALED,
) -> Tensor:
    (tokens, heads, dim), (_, _, kv_heads, size, _) = q.shape, kv.shape
    if not _has_rows(kv, dim) or size != context.block_size or context.slot_mapping.shape[0] != tokens:
        refuse("attention", q=q, kv=kv, slot_mapping=context.slot_mapping)
    if not 0 < kv_heads <= heads or heads % kv_heads:
        refuse("attention", q=q, kv=kv)
    if window is not None and window < 1:
        _refuse_window("attention", window)
    if sinks is not None and sinks.shape != (heads,):
        refuse("attention", q=q, sinks=sinks)
    if slopes is not None and slopes.shape != (heads,):
        refuse("attention", q=q, slopes=slopes)
    _check_bias("attention", q, bias)
    if last is not None and last.shape != (tokens,):
        refuse("attention", q=q, last=last)
    known = _plain(sinks) and _plain(slopes) and (last is None or (slopes is None and _is_table(last)))
    most = _TILE if bias is None else 1  # query heads that share a key head
    if not (known and _plain(bias) and _fit(q) and _suits(kv, q)) or heads > most * kv_heads:
        limits: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "slopes": slopes, "bias": bias}
        limits |= {"window": window, "scales": scales, "last": last}
        return reference.attention(q, kv, context, scale=scale, **limits)
    q = q.contiguous()
    out = empty(q.shape, q.dtype)
    table = context.block_table
    run(
        *(q.data_ptr(), out.data_ptr(), kv.data_ptr(), *kv.shape[1:4], dim, heads),
        *(context.query_starts.data_ptr(), context.kv_lens.data_ptr(), table.data_ptr()),
        *(table.stride(0), table.shape[0], scale, softcap or 0.0, window or 0, KINDS[q.dtype]),
        *(_CACHED[kv.dtype], address(sinks), address(slopes), address(last), context.first),
        *(address(bias), _reach(bias)),
    )
    return out


def encoder_attention(
    run: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ForwardContext,
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    if k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or not 0 < kv_heads <= heads:
        refuse("encoder_attention", q=q, k=k, v=v)
    if heads % kv_heads or context.positions.shape[0] != tokens:
        refuse("encoder_attention", q=q, k=k, v=v, positions=context.positions)
    _check_bias("encoder_attention", q, bias)
    if window is not None and window < 0:
        _refuse_window("encoder_attention", window)
    most = _TILE if bias is None else 1  # query heads that share a key head
    if not _fit(q, k, v) or heads > most * kv_heads:
        limits: dict[str, Any] = {"window": window, "bias": bias, "causal": causal}
        return encoder_ops.encoder_attention(q, k, v, context, scale=scale, **limits)
    out = empty(q.shape, q.dtype)
    added = None if bias is None else bias.float().contiguous()
    run(
        *(q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
        *(out.data_ptr(), context.query_starts.data_ptr(), context.query_starts.shape[0] - 1),
        *(heads, kv_heads, dim),
        *(scale, -1 if window is None else window, address(added)),
        *(_reach(added), causal, KINDS[q.dtype]),
    )
    return out


def disentangled_attention(
    run: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: ForwardContext,
    distances: Distances,
    *,
    scale: float,
) -> Tensor:
    tokens, heads, dim = q.shape
    if k.shape != q.shape or v.shape != q.shape or context.positions.shape[0] != tokens:
        refuse("disentangled_attention", q=q, k=k, v=v, positions=context.positions)
    tables = [table for table in (distances.keys, distances.queries) if table is not None]
    count, longest = tables[0].shape[1], len(distances.rows) // 2 + 1
    if any(table.shape != (heads, count, dim) for table in tables):
        refuse("disentangled_attention", q=q, distances=tables[0])
    if max(context.query_lens_host, default=0) > longest:
        refuse("disentangled_attention", q=q, rows=distances.rows)
    of_type = all(table.dtype == q.dtype and table.is_contiguous() for table in tables)
    if not _fit(q, k, v) or not of_type:
        return encoder_ops.disentangled_attention(q, k, v, context, distances, scale=scale)
    out = empty(q.shape, q.dtype)
    run(
        *(q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
        *(out.data_ptr(), context.query_starts.data_ptr(), context.query_starts.shape[0] - 1),
        *(heads, dim, scale, address(distances.keys), address(distances.queries), count),
        *(distances.rows.data_ptr(), longest, KINDS[q.dtype]),
    )
    return out


def _refuse_window(operation: str, window: int) -> NoReturn:
    raise ValueError(f"{operation}: a window of {window} positions shows a token nothing")


def _check_bias(operation: str, q: Tensor, bias: Tensor | None) -> None:
    """Refuse biases of other heads, and those that have not as many distances on either side."""
    if bias is not None and (bias.dim() != 2 or bias.shape[0] != q.shape[1] or not bias.shape[1] % 2):
        refuse(operation, q=q, bias=bias)


def _reach(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.shape[1] // 2


def _check_heads(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, context: ForwardContext) -> None:
    """Refuse keys and values that are not as the cache holds them, one of each for every token."""
    (tokens, _, dim), (_, _, kv_heads, size, _) = q.shape, kv.shape
    if k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or not _has_rows(kv, dim):
        refuse("rotary_and_cache", q=q, k=k, v=v, kv=kv)
    if size != context.block_size or context.slot_mapping.shape[0] != tokens:
        refuse("rotary_and_cache", q=q, kv=kv, slot_mapping=context.slot_mapping)


def _check_rotation(operation: str, x: Tensor, cos_sin: Tensor) -> None:
    """Refuse a rotation of more dimensions than heads have, and that of other tokens."""
    (tokens, _, dim), (rotations, rotated) = x.shape, cos_sin.shape
    if rotations != tokens or rotated > dim or rotated % 2:
        refuse(operation, x=x, cos_sin=cos_sin)


def _fit(*tensors: Tensor) -> bool:
    """Whether the kernels know this type and width, and the heads of each token lie one after the other."""
    dtype, dim = tensors[0].dtype, tensors[0].shape[2]
    for x in tensors:  # for every layer of every step, so not by a generator, which takes twice as long
        if x.dtype != dtype or x.stride()[1:] != (dim, 1):
            return False
    return dtype in KINDS and dim % 8 == 0 and 0 < dim <= _MAX_DIM


def _has_rows(kv: Tensor, dim: int) -> bool:
    return kv.shape[-1] == stored_shape((dim,), kv.dtype)[0]


def _suits(kv: Tensor, q: Tensor) -> bool:
    return kv.dtype in (q.dtype, CODES) and kv.is_contiguous()


def _agree(norm: Tensor | None, other: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether one is missing, or both have contiguous weights of one type: the heads', or float32."""
    if norm is None or other is None:
        return True
    contiguous = norm.is_contiguous() and other.is_contiguous()
    return contiguous and norm.dtype == other.dtype and norm.dtype in (dtype, torch.float32)


def _plain(given: Tensor | None) -> bool:
    """Whether the kernels can read what they are given beside heads, if they are: float32 in one piece."""
    return given is None or (given.dtype == torch.float32 and given.is_contiguous())


def _is_table(last: Tensor) -> bool:
    return last.dtype == torch.int32 and last.is_contiguous()


def _angles(cos_sin: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if cos_sin is None else (cos_sin.data_ptr(), cos_sin.shape[1])
