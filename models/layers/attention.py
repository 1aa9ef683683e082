"""Attention over the paged cache. It owns nothing but its view of the cache, which the worker binds."""

from __future__ import annotations

from torch import Tensor, nn

from models import ops
from models.context import context
from models.ops.head_prep import AS_PROJECTED, HeadPrep


class Attention(nn.Module):
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
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self.kv: Tensor | None = None  # [2, blocks, kv_heads, block_size, head_dim]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prep: HeadPrep = AS_PROJECTED,
    ) -> Tensor:
        """q [T, heads * head_dim], k and v [T, kv_heads * head_dim] -> [T, heads * head_dim]."""
        if self.kv is None:
            raise RuntimeError("an attention layer ran before the worker bound its cache")
        step, tokens = context(), len(q)
        # With -1 in place of `tokens`, heads of another number or width would be read as other tokens.
        q = ops.rotary_and_cache(
            q.view(tokens, self.heads, self.head_dim),
            k.view(tokens, self.kv_heads, self.head_dim),
            v.view(tokens, self.kv_heads, self.head_dim),
            self.kv,
            step,
            prep,
        )
        out = ops.attention(
            q, self.kv, step, scale=self.scale, window=self.window, softcap=self.softcap
        )  # [T, heads, head_dim]
        return out.flatten(1)
