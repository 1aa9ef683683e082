"""The resampler: learned queries read the rows of a picture, and become as many rows of the text's width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError
from models.layers.linear import Linear, frozen
from models.layers.norm import LayerNorm

_HEAD = 128
_EPS = 1e-6


class Resampler(nn.Module):
    """One cross-attention, in the form and under the names of torch's MultiheadAttention.

    Keys know their row and column in the picture, and values do not.
    """

    queries: nn.Parameter  # [heads, queries, head]: normalised and projected
    in_matrices: nn.ParameterList  # of keys, and of values
    in_biases: list[Tensor]
    projection: nn.Parameter

    def __init__(self, queries: int, inputs: int, size: int) -> None:
        """`inputs`: the width of the tower's rows; `size`: that of the text's embeddings."""
        super().__init__()
        if size % _HEAD:
            raise ConfigError(f"config.json: a hidden_size of {size} is no multiple of the {_HEAD} of a head")
        self.count, self.size = queries, size
        self.kv_proj = Linear(inputs, size)
        self.kv_norm, self.last_norm = LayerNorm(size, _EPS), LayerNorm(size, _EPS)
        self.out = Linear(size, size, bias=True)

    def pull(self, weights: Weights) -> None:
        size, attention = self.size, weights / "attn"
        matrix = attention.take("in_proj_weight", [3 * size, size])
        bias = attention.take("in_proj_bias", [3 * size])
        query = weights.take("query", [self.count, size]).float()
        scale, shift = (weights.take(f"ln_q.{kind}", [size]).float() for kind in ("weight", "bias"))
        normed = F.layer_norm(query, [size], scale, shift, _EPS)
        projected = F.linear(normed, matrix[:size].float(), bias[:size].float()).to(matrix.dtype)
        self.queries = frozen(self._heads(projected).contiguous())
        self.in_matrices = nn.ParameterList(
            frozen(ops.pack(part.contiguous())) for part in matrix[size:].chunk(2)
        )
        self.in_biases = [part.contiguous() for part in bias[size:].chunk(2)]
        self.projection = frozen(ops.pack(weights.take("proj", [size, size]).t().contiguous()))
        for part, name in ((self.kv_proj, "kv_proj"), (self.kv_norm, "ln_kv"), (self.last_norm, "ln_post")):
            load(part, weights / name)
        load(self.out, attention / "out_proj")

    def forward(self, x: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """x [T, inputs]: the rows of pictures of these rows and columns, packed -> [N * queries, size]."""
        pieces = x.split([rows * columns for rows, columns in grids])
        read = [self._read(piece, *grid) for piece, grid in zip(pieces, grids, strict=True)]
        return ops.linear(self.last_norm(self.out(torch.cat(read))), self.projection, None)

    def _read(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """What the queries read of one picture [queries, size]. Pictures take turns, for their keys and
        values need more memory than the tower does."""
        values = self.kv_norm(self.kv_proj(x))
        keys = values + sine_positions(rows, columns, self.size, x.device).to(values.dtype)
        keys, values = (
            self._heads(ops.linear(each, matrix, bias))
            for each, matrix, bias in zip((keys, values), self.in_matrices, self.in_biases, strict=True)
        )
        heads = F.scaled_dot_product_attention(self.queries[None], keys[None], values[None])[0]
        return heads.transpose(0, 1).reshape(self.count, self.size)

    def _heads(self, rows: Tensor) -> Tensor:
        """Cut rows [T, size] by head: [heads, T, head]."""
        return rows.view(len(rows), -1, _HEAD).transpose(0, 1)


def sine_positions(rows: int, columns: int, size: int, device: torch.device) -> Tensor:
    """The positions of a grid's cells [rows * columns, size] float32: half of each is of the column, the
    other half of the row, and of each half the sines come first."""
    quarter = size // 4
    frequencies = 1.0 / 10_000 ** (torch.arange(quarter, dtype=torch.float32, device=device) / quarter)

    def of(count: int) -> Tensor:
        angles = torch.outer(torch.arange(count, dtype=torch.float32, device=device), frequencies)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    return torch.cat([of(columns).repeat(rows, 1), of(rows).repeat_interleave(columns, 0)], dim=1)
