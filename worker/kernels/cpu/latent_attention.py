"""Latent attention by `csrc/attention_latent.c`, and what it reads by `csrc/token_indexer.c`.

The reference computes both in float16, the first for odd ranks and the second for many or odd heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.context import ForwardContext
from models.ops import latent_ops
from models.ops.grouped_matrix import Matrix
from worker.kernels.cpu.library import Kernel, Library
from worker.kernels.cpu.packing import Packed, Packer
from worker.kernels.cpu.tensors import KINDS, address, empty, refuse

_PANEL, _RANK_STEP, _MOST_ROPE = 32, 16, 256
"""Outputs of a panel, what ranks are multiples of, and the widest rotated key, as in `csrc`."""
_MOST_INDEX_HEADS, _MOST_INDEX_WIDTH = 64, 512
"""The most heads of an indexer and their greatest width: LATENT_ROWS and MAX_DIM in `csrc`."""


class PackedLatent(nn.Parameter):
    """Matrices that make keys and values of latents, in panels that only `latent_attention` can read."""

    of_keys: Packed
    """A matrix [rank, nope] for each head, which turns queries into such of latents."""
    of_values: Packed
    """A matrix [value, rank] for each head."""
    heads: int
    nope: int
    rank: int
    value: int
    bytes_before: int
    """The bytes of the matrix as it was loaded."""


def bind(library: Library) -> dict[str, Callable[..., Any]]:
    """The operations of this module by name, for `models.ops.use`."""
    return {
        "pack_latent": _pack_latent(library),
        "latent_attention": partial(latent_attention, library.function("attention_latent")),
        "choose_tokens": partial(choose_tokens, library.function("choose_tokens")),
    }


def _pack_latent(library: Library) -> Callable[..., Tensor]:
    packer = Packer(library, None)

    def pack_latent(weight: Matrix, heads: int, nope: int, rank: int) -> Tensor:
        up = latent_ops.pack_latent(weight, heads, nope, rank)  # [heads, nope + value, rank]
        if up.dtype not in KINDS or up.device.type != "cpu" or rank % _RANK_STEP:
            return up
        keys, values = up[:, :nope].transpose(1, 2), up[:, nope:]
        memory, matrices = packer.as_they_are(_in_panels(keys), _in_panels(values))
        packed = PackedLatent(memory, requires_grad=False)
        packed.of_keys, packed.of_values = matrices
        packed.heads, packed.nope, packed.rank, packed.value = heads, nope, rank, values.shape[1]
        packed.bytes_before = up.nbytes
        return packed

    return pack_latent


def _in_panels(matrices: Tensor) -> Tensor:
    """[heads, outputs, inputs] -> one below the other, each filled up with zeros to whole panels."""
    return F.pad(matrices, (0, 0, 0, -matrices.shape[1] % _PANEL)).flatten(0, 1)


def latent_attention(
    run: Kernel,
    q: Tensor,
    latent: Tensor,
    up: Tensor,
    cache: Tensor,
    context: ForwardContext,
    cos_sin: Tensor | None,
    *,
    scale: float,
    chosen: Tensor | None = None,
) -> Tensor:
    if type(up) is not PackedLatent:
        return latent_ops.latent_attention(q, latent, up, cache, context, cos_sin, scale=scale, chosen=chosen)
    _check(q, latent, up, cache, context, cos_sin, chosen)
    tokens, heads, width = q.shape
    q = q.contiguous()
    if latent.stride(1) != 1:
        latent = latent.contiguous()
    rotated = 0
    if cos_sin is not None:
        cos_sin, rotated = cos_sin.float().contiguous(), cos_sin.shape[1]
    out = empty((tokens, heads, up.value), q.dtype)
    table = context.block_table
    run(
        *(q.data_ptr(), latent.data_ptr(), latent.stride(0), up.of_keys.address, up.of_values.address),
        *(heads, width - up.nope, up.rank, up.value),
        *(cache.data_ptr(), context.block_size, context.slot_mapping.data_ptr()),
        *(address(cos_sin), rotated),
        *(context.query_starts.data_ptr(), context.kv_lens.data_ptr(), table.data_ptr()),
        *(table.stride(0), table.shape[0], tokens),
        *(address(chosen), 0 if chosen is None else chosen.shape[1], scale, out.data_ptr()),
        context.first,
    )
    return out


def choose_tokens(
    run: Kernel,
    q: Tensor,
    key: Tensor,
    weights: Tensor,
    cache: Tensor,
    context: ForwardContext,
    cos_sin: Tensor | None,
    *,
    most: int,
) -> Tensor:
    tokens, heads, width = q.shape
    rotated = 0 if cos_sin is None else cos_sin.shape[1]
    if key.shape != (tokens, width) or weights.shape != (tokens, heads):
        refuse("choose_tokens", q=q, key=key, weights=weights)
    if cos_sin is not None and (len(cos_sin) != tokens or rotated > width):
        refuse("choose_tokens", q=q, cos_sin=cos_sin)
    if cache.shape[1:] != (context.block_size, width) or not cache.is_contiguous():
        refuse("choose_tokens", q=q, cache=cache)
    if context.slot_mapping.shape[0] != tokens:
        refuse("choose_tokens", q=q, slot_mapping=context.slot_mapping)
    known = q.dtype in KINDS and q.dtype == key.dtype == cache.dtype and weights.dtype == torch.float32
    if not known or heads > _MOST_INDEX_HEADS or width > _MOST_INDEX_WIDTH or (width | rotated) % 2:
        return latent_ops.choose_tokens(q, key, weights, cache, context, cos_sin, most=most)
    q, key, weights = q.contiguous(), key.contiguous(), weights.contiguous()
    if cos_sin is not None:
        cos_sin = cos_sin.float().contiguous()
    chosen = empty((tokens, most), torch.int32)
    table = context.block_table
    run(
        *(q.data_ptr(), key.data_ptr(), weights.data_ptr(), heads, width),
        *(cache.data_ptr(), context.block_size, context.slot_mapping.data_ptr()),
        *(address(cos_sin), rotated),
        *(context.query_starts.data_ptr(), context.kv_lens.data_ptr(), table.data_ptr()),
        *(table.stride(0), table.shape[0], tokens, most, chosen.data_ptr(), KINDS[q.dtype]),
    )
    return chosen


def _check(
    q: Tensor,
    latent: Tensor,
    up: PackedLatent,
    cache: Tensor,
    context: ForwardContext,
    cos_sin: Tensor | None,
    chosen: Tensor | None,
) -> None:
    """Refuse tensors that do not fit each other, and those that kernels cannot read with packed matrices."""
    (tokens, heads), rope = q.shape[:2], q.shape[2] - up.nope
    known = heads == up.heads and 0 < rope <= _MOST_ROPE and rope % 2 == 0
    if not known or latent.shape != (tokens, up.rank + rope):
        refuse("latent_attention", q=q, latent=latent)
    if cache.shape[1:] != (context.block_size, up.rank + rope) or not cache.is_contiguous():
        refuse("latent_attention", q=q, cache=cache)
    if context.slot_mapping.shape[0] != tokens:
        refuse("latent_attention", q=q, slot_mapping=context.slot_mapping)
    if cos_sin is not None and (len(cos_sin) != tokens or cos_sin.shape[1] > rope or cos_sin.shape[1] % 2):
        refuse("latent_attention", q=q, cos_sin=cos_sin)
    if chosen is not None and (len(chosen) != tokens or not chosen.is_contiguous()):
        refuse("latent_attention", q=q, chosen=chosen)
    if any(x.dtype != up.of_keys.numbers for x in (q, latent, cache)):
        kinds = ", ".join(str(x.dtype) for x in (q, latent, cache))
        raise ValueError(f"latent_attention: {kinds} do not fit matrices of {up.of_keys.numbers}")
