"""Attention of encoders: a token sees its whole text, which is computed in one step. There is no cache."""

from __future__ import annotations

from torch import Tensor, nn

from models import ops
from models.context import context


class EncoderAttention(nn.Module):
    """The heads of one layer that this rank holds. It owns no tensors."""

    def __init__(self, *, head_dim: int, scale: float, window: int | None = None) -> None:
        """`window`: how many positions a token sees on each side; None: all."""
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.window = window

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cos_sin: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
    ) -> Tensor:
        """q, k, v [T, heads * head_dim] -> [T, heads * head_dim]. Keys and values may have fewer heads.

        cos_sin [T, R]: this step's rotation; q_norm, k_norm [head_dim]: weights of norms of each head;
        bias [heads, 2 * reach + 1]: for distances, as in the operation.
        """
        q, k, v = (x.view(len(x), -1, self.head_dim) for x in (q, k, v))
        if q_norm is not None and k_norm is not None:
            q, k = ops.rms_norm(q, q_norm, eps), ops.rms_norm(k, k_norm, eps)
        if cos_sin is not None:
            q, k = ops.rotate(q, cos_sin), ops.rotate(k, cos_sin)
        heads = ops.encoder_attention(q, k, v, context(), scale=self.scale, window=self.window, bias=bias)
        return heads.flatten(1)
