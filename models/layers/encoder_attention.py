"""Attention of encoders, in which a token sees its whole text. A text is one step, so there is no cache."""

from __future__ import annotations

from torch import Tensor, nn

from models import ops
from models.context import context
from models.ops.head_prep import AS_PROJECTED, HeadPrep


class EncoderAttention(nn.Module):
    """The heads of one layer that this rank holds. It owns no tensors."""

    def __init__(self, *, head_dim: int, scale: float, window: int | None = None) -> None:
        """`window` is the number of positions that a token sees on each side; None means all."""
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.window = window

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

        bias [heads, 2 * reach + 1]: added to the scores by distance, as `ops.encoder_attention` says.
        """
        q, k, v = (x.view(len(x), -1, self.head_dim) for x in (q, k, v))
        if prep.q_norm is not None and prep.k_norm is not None:
            q, k = ops.rms_norm(q, prep.q_norm, prep.eps), ops.rms_norm(k, prep.k_norm, prep.eps)
        if prep.cos_sin is not None:
            q, k = ops.rotate(q, prep.cos_sin), ops.rotate(k, prep.cos_sin)
        heads = ops.encoder_attention(q, k, v, context(), scale=self.scale, window=self.window, bias=bias)
        return heads.flatten(1)
