"""Attention of an answer to its source, whose keys and values are computed once and kept in blocks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.config import ModelConfig
from models.context import ForwardContext, context
from models.layers.linear import Linear, RowLinear
from models.ops.attention_inputs import UNSCALED, stored_shape, widened
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span


@dataclass(frozen=True, slots=True)
class SourceInput:
    """The input of an encoder on the device: token ids, or features of a recording."""

    ids: Tensor | None  # [length] int64
    features: Tensor | None  # [bands, frames], of the model's type of numbers


class SourceModel(Protocol):
    """The methods that a model has beside `ServedModel` if it reads sources."""

    source_kind: Literal["tokens", "audio"]
    """The kind of sources: tokens or audio."""
    source_len: int
    """The most positions that its encoder gives of a source."""
    source_shape: tuple[int, int]
    """The bands and frames of a recording's features; (0, 0) if it reads tokens."""

    def encode(self, sources: Sequence[SourceInput], step: ForwardContext) -> Generator[None, None, None]:
        """Encode sources, packed as `step` says, and have each layer write its keys and values. Where layers
        of the encoder have `pauses = True`, the computation may pause behind each of them.

        A source gives the same bits alone and beside any others.
        """
        ...

    def modules(self) -> Iterator[nn.Module]: ...


class KeysWithoutBias(Linear):
    """Projections of which those of keys may have no bias in the checkpoint: adding 0 changes no number."""

    def _bias(self, weights: Weights, size: int, rows: Span) -> Tensor:
        if weights.path.endswith("k_proj") and "bias" not in weights:
            return torch.zeros(rows.length, dtype=weights.dtype, device=weights.device)
        return super()._bias(weights, size, rows)


class CrossAttention(nn.Module):
    """The heads of one layer that this rank holds, which see all of a source, with their projections."""

    def __init__(
        self, config: ModelConfig, parallel: Parallel, *, scale: float, bias: bool, output: str
    ) -> None:
        """`output`: the name of the last projection in the checkpoint."""
        super().__init__()
        heads = parallel.share_heads(config.num_heads)
        share = heads.times(config.head_dim)
        self.heads, self.head_dim, self.scale = heads.length, config.head_dim, scale
        self.all_heads = config.num_heads
        self.given_out: list[int] = []
        """The heads of this rank whose queries are given out if a step asks for them."""
        self.q_proj = Linear(config.hidden_size, [share], bias=bias)
        self.kv_proj = KeysWithoutBias(
            config.hidden_size, [share, share], bias=bias, sources=("k_proj", "v_proj")
        )
        self.output = output
        self.out = RowLinear(share, config.hidden_size, parallel, bias=bias)
        self.kv: Tensor | None = None  # [2, blocks, heads, block_size, head_dim], bound by the worker

    def pull(self, weights: Weights) -> None:
        self.q_proj.pull(weights / "q_proj")
        self.kv_proj.pull(weights / "kv_proj")
        self.out.pull(weights / self.output)

    def cache_shape(self, blocks: int, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
        return stored_shape((2, blocks, self.heads, block_size, self.head_dim), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size], by the sources of the step."""
        source = context().source
        if source is None or self.kv is None:
            raise RuntimeError("cross-attention ran without sources, or before the worker bound their blocks")
        q = self.q_proj(x).view(len(x), self.heads, self.head_dim)
        if source.queries is not None and self.given_out:
            source.queries.append(q[:, self.given_out])
        heads = ops.attention(q, self.kv, source, scale=self.scale, last=source.last, scales=UNSCALED)
        return self.out(heads.flatten(1))

    def weights(self, queries: Tensor, blocks: Tensor, length: int) -> Tensor:
        """How much the queries [T, heads, head_dim] that were given out attend to each position of a source,
        whose keys lie in these blocks: [heads, T, length] float32."""
        if self.kv is None:
            raise RuntimeError("a source was read before the worker bound blocks for it")
        keys = self.kv[0].index_select(0, blocks)[:, self.given_out].transpose(0, 1).flatten(1, 2)[:, :length]
        scores = queries.transpose(0, 1).float() @ widened(keys, torch.float32).transpose(1, 2)
        return (scores * self.scale).softmax(-1)

    def write(self, states: Tensor) -> None:
        """Keep the keys and values of what an encoder gave [S, hidden_size], at the places of the context."""
        if self.kv is None:
            raise RuntimeError("a source was encoded before the worker bound blocks for it")
        keys, values = self.kv_proj(states).split(self.kv_proj.widths, dim=-1)
        keys, values = (x.view(len(states), self.heads, self.head_dim) for x in (keys, values))
        ops.rotary_and_cache(keys, keys, values, self.kv, context())


def cross_layers(modules: Iterator[nn.Module]) -> list[CrossAttention]:
    """The layers of cross-attention, in the order in which a step computes them."""
    return [each for each in modules if isinstance(each, CrossAttention)]


def find_source_model(modules: Iterable[nn.Module]) -> SourceModel | None:
    """The part of a model that answers to sources, among its modules, if there is one."""
    return cast(
        "SourceModel | None", next((each for each in modules if getattr(each, "source_kind", "")), None)
    )
