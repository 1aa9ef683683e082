"""Attention over the paged cache, which a layer describes and the worker binds; encoders have none."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.context import ForwardContext, context
from models.layers.linear import cut_of, frozen
from models.ops.attention_inputs import AS_PROJECTED, UNSCALED, CacheScales, HeadPrep
from models.ops.encoder_ops import attend_to_seen
from models.parallel.rank_shares import Span
from models.quantization.readers.group_slices import read_one_scale
from models.weight_slices import Cut

_OF_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale")
_OF_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale")
_OF_BOTH = ("kv_scale", "attn.kv_scale")
"""The names of scales of cached keys, of cached values and of both."""


@dataclass(frozen=True)
class QueryGrowth:
    """Queries are larger the later they are, so that attention stays as sharp over long texts."""

    rate: float
    length: int
    """The tokens of a text after which queries begin to grow."""

    def of(self, q: Tensor) -> Tensor:
        """The queries [T, F] of this step as large as their positions make them."""
        return ops.scale_by_position(q, context().positions, self.rate, self.length)


class CachedAttention(nn.Module, ABC):
    """Attention over a paged cache, of which the worker binds this layer's part to `kv`."""

    kv: Tensor | None
    group: int = 0
    """The group of layers whose block table tells where keys and values lie; the worker sets it."""
    owns_cache: bool = True
    """Whether the worker makes a cache for this layer, which else reads that of another one."""

    @abstractmethod
    def cache_shape(self, blocks: int, block_size: int) -> tuple[int, ...]:
        """The shape of the cache of so many blocks."""
        ...

    @abstractmethod
    def cache_parts(self) -> list[Tensor]:
        """The contiguous tensors [blocks, ...] of which the bound cache consists."""
        ...

    @abstractmethod
    def step_bytes(self, tokens: int, positions: int, chunk: int, itemsize: int) -> int:
        """An upper bound of the bytes that a step takes for this layer, whatever computes it.

        It has `tokens` new ones; the longest sequence has `positions`, of which `chunk` are new.
        """
        ...

    def bound(self) -> Tensor:
        if self.kv is None:
            raise RuntimeError("an attention layer ran before the worker bound its cache")
        return self.kv


class Attention(CachedAttention):
    """The heads of one layer that this rank holds: from projected q, k, v to the heads' outputs."""

    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Span | None = None,
        slopes: Sequence[float] | None = None,
        biased: bool = False,
        owner: Attention | None = None,
        sees_ahead: bool = True,
    ) -> None:
        """`sinks`: this rank's piece of all heads, if the checkpoint has `sinks` beside this layer.

        `slopes`: for each head what its scores lose with each position of distance (alibi); None: nothing.
        `biased`: whether `bias` will be there when the layer is read.
        `owner`: the earlier layer with heads of the same width whose cache this one reads; None: its own.
        `sees_ahead`: whether tokens see as far as the step's `last` says; else no token sees later ones.
        """
        super().__init__()
        self._owner = (owner,)  # the tuple hides that layer, which is no part of this one
        self.owns_cache = owner is None
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self._sees_ahead = sees_ahead
        self.held_sinks = sinks
        self.sinks: Tensor | None = None  # [heads] float32
        self.held_slopes = slopes
        self.slopes: Tensor | None = None  # [heads] float32
        self.biased = biased
        self.bias: Tensor | None = None  # [heads, 2 * reach + 1] float32, as `ops.attention` takes it
        self.kv: Tensor | None = None  # [2, blocks, kv_heads, block_size, head_dim]
        self.cache_scales: CacheScales | None = None
        """What the checkpoint has for a cache of 8 bits."""

    def pull(self, weights: Weights) -> None:
        if self.owns_cache:
            self.cache_scales = read_cache_scales(weights.sibling(""))
        if (heads := self.held_sinks) is not None:
            cut = cut_of(0, heads)
            self.sinks = frozen(weights.sibling("").take("sinks", [heads.size], cut, dtype=torch.float32))
        if self.held_slopes is not None:
            self.slopes = torch.tensor(self.held_slopes, dtype=torch.float32, device=weights.device)

    def cache_shape(self, blocks: int, block_size: int) -> tuple[int, ...]:
        return 2, blocks, self.kv_heads, block_size, self.head_dim

    def cache_parts(self) -> list[Tensor]:
        return list(self.bound())

    def step_bytes(self, tokens: int, positions: int, chunk: int, itemsize: int) -> int:
        heads, kv_heads = self.heads * self.head_dim, self.kv_heads * self.head_dim  # features
        # Where scores are changed, the plain attention writes those of one sequence out, and two copies.
        changes = self.biased or self.softcap is not None or self.held_slopes is not None
        changed = self.heads if changes else 0
        prepared = tokens * 3 * (heads + 2 * kv_heads)
        gathered = positions * 4 * kv_heads
        return (prepared + gathered) * itemsize + 3 * 4 * changed * chunk * positions

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prep: HeadPrep = AS_PROJECTED,
    ) -> Tensor:
        """q [T, heads * head_dim], k and v [T, kv_heads * head_dim] -> [T, heads * head_dim]."""
        kv, step, tokens = self.bound(), context(self.group), len(q)
        # With -1 in place of `tokens`, heads of another number or width would be read as other tokens.
        k = k.view(tokens, self.kv_heads, self.head_dim)
        v = v.view(tokens, self.kv_heads, self.head_dim)
        heads = q.view(tokens, self.heads, self.head_dim)
        q = ops.rotary_and_cache(heads, k, v, kv, step, prep, self.cache_scales or UNSCALED)
        return self.attend(q, kv, step, self.cache_scales, self.window)

    def read(self, q: Tensor, prep: HeadPrep = AS_PROJECTED) -> Tensor:
        """q [T, heads * head_dim] -> [T, heads * head_dim], by the cache of this layer's owner as it is."""
        (owner,) = self._owner
        if owner is None:
            raise RuntimeError("an attention layer was to read the cache of another one, and has its own")
        heads = q.view(len(q), self.heads, self.head_dim)
        q = ops.rotate(heads, prep.cos_sin, prep.q_norm, prep.eps)
        return self.attend(q, owner.bound(), context(owner.group), owner.cache_scales, self.window)

    def attend(
        self, q: Tensor, kv: Tensor, step: ForwardContext, scales: CacheScales | None, window: int | None
    ) -> Tensor:
        """Prepared queries [T, heads, head_dim] -> [T, heads * head_dim]."""
        out = ops.attention(
            q,
            kv,
            step,
            scale=self.scale,
            window=window,
            softcap=self.softcap,
            sinks=self.sinks,
            slopes=self.slopes,
            bias=self.bias,
            last=step.last if self._sees_ahead else None,
            scales=scales or UNSCALED,
        ).flatten(1)
        if step.whole is not None and window is not None and max(step.kv_lens_host) > window:
            out = torch.where(step.whole[:, None], self.attend(q, kv, step, scales, None), out)
        return out


class EncoderAttention(nn.Module):
    """Attention of encoders, in which a token sees its whole text, which is one step: there is no cache."""

    def __init__(
        self, *, head_dim: int, scale: float, window: int | None = None, causal: bool = False
    ) -> None:
        """`window` is the number of positions that a token sees on each side; None means all.

        If it is `causal`, a token sees none of those after it.
        """
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.causal = causal
        self.bias: Tensor | None = None  # [heads, 2 * reach + 1], where it is the layer's own

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prep: HeadPrep = AS_PROJECTED,
        *,
        bias: Tensor | None = None,
    ) -> Tensor:
        """q, k, v [T, heads * head_dim] -> [T, heads * head_dim]. Keys and values may have fewer heads.

        bias [heads, 2 * reach + 1]: added to the scores by distance, as `ops.encoder_attention` says; None:
        those of the layer itself, if it has some.
        """
        bias = self.bias if bias is None else bias
        q, k, v = (x.view(len(x), -1, self.head_dim) for x in (q, k, v))
        if prep.q_norm is not None and prep.k_norm is not None:
            q, k = ops.rms_norm(q, prep.q_norm, prep.eps), ops.rms_norm(k, prep.k_norm, prep.eps)
        if prep.cos_sin is not None:
            q, k = ops.rotate(q, prep.cos_sin), ops.rotate(k, prep.cos_sin)
        step = context()
        heads = ops.encoder_attention(
            *(q, k, v, step), scale=self.scale, window=self.window, bias=bias, causal=self.causal
        )
        if step.seen is not None:
            attend_to_seen(heads, q, k, v, step, scale=self.scale, window=self.window, bias=bias)
        return heads.flatten(1)


def alibi_slopes(heads: int, most: float = 8.0) -> list[float]:
    """The slopes of so many heads: powers of 2 whose exponents go down to -`most` in equal steps.

    Where their number is no power of two, it is filled up by the slopes between those of fewer heads.
    """
    count = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-most * (number + 1) / count) for number in range(count)]
    return slopes if count == heads else [*slopes[1::2], *slopes[::2]][:heads]


@dataclass(frozen=True)
class Buckets:
    """The buckets of distances from query to key, for each of which T5 and MPNet have learned a bias."""

    count: int = 32
    reach: int = 128
    """The distance beyond which all keys share the last bucket of their side."""
    ahead: bool = True
    """Whether half of them are for keys that stand after the query; else no query sees such a key."""

    def of(self, distance: Tensor) -> Tensor:
        """The bucket of each distance from a query to a key.

        Half of those of a side have one distance each, and the others grow like a logarithm.
        """
        side = self.count // 2 if self.ahead else self.count
        near = side // 2
        away = distance.abs() if self.ahead else -distance.clamp(max=0)
        grown = torch.log(away.float() / near) / math.log(self.reach / near) * (side - near)
        far = (near + grown.clamp(min=0).long()).clamp(max=side - 1)
        return torch.where((distance > 0) & self.ahead, side, 0) + torch.where(away < near, away, far)


def read_bias(weights: Weights, heads: Span, buckets: Buckets) -> nn.Parameter:
    """Read the biases of these heads [heads, 2 * reach + 1] float32, as attention takes them."""
    cut = None if heads.is_whole else Cut(1, heads.start, heads.stop)
    values = weights.take("weight", [buckets.count, heads.size], cut)  # [buckets, heads]
    rows = buckets.of(torch.arange(-buckets.reach, buckets.reach + 1))
    return frozen(values[rows.to(values.device)].t().float().contiguous())


def read_cache_scales(scope: Weights) -> CacheScales | None:
    """Read the scales beside the projections of a layer of attention; None if there are none.

    Scales of heads are left unread: only `--kv-cache-dtype` makes a difference of them, and refuses them.
    """
    if not scope.is_real:
        return None
    keys, values = (read_one_scale(scope, (*names, *_OF_BOTH)) for names in (_OF_KEYS, _OF_VALUES))
    if keys is None and values is None:
        return None
    return CacheScales(keys or values or 1.0, values or keys or 1.0)
