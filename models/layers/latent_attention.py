"""Latent attention: all heads make their keys and values of one short vector, which alone is cached.

An indexer may choose the tokens that it reads, by keys of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.context import context
from models.layers.attention import CachedAttention, QueryGrowth
from models.layers.linear import Linear, Pairs, RowLinear, cut_of, frozen
from models.layers.norm import FrontRMSNorm, LayerNorm, RMSNorm
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import Span
from models.quantization.matrices import read_plain_matrix

_EPS = 1e-6
"""The epsilon of the two small norms, whatever config.json says of the others."""
_MOST_ROWS = 512
"""Cached rows of which keys and values are made at a time, where no kernel does without."""


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The sizes of an indexer, which chooses the tokens that a token attends to."""

    query_rank: int
    """The width of what its queries are made of, which is what attention's are made of."""
    heads: int
    width: int
    """The numbers of a head's query and of a key."""
    rope: int
    """The numbers at their beginning that are rotated."""
    most: int
    """The most tokens that are chosen for a token."""
    turns_neighbours: bool
    """Whether its rotation pairs dimensions 2i and 2i + 1."""


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """The widths of latent attention."""

    query_rank: int | None
    """The width of what queries are made of; None means that they are made of the hidden states."""
    rank: int
    """The width of a latent."""
    nope: int
    """The numbers of a head's query that know no position."""
    rope: int
    """The numbers behind them, which are rotated, as is the key that all heads share."""
    value: int
    """The numbers of a head's value."""
    bias: bool = False
    """Whether the projections of hidden states and of heads have biases."""
    turns_neighbours: bool = True
    """Whether rotation pairs dimensions 2i and 2i + 1."""
    indexer: IndexerSpec | None = None
    """What chooses the tokens that are read; None means that all are."""


class TokenIndexer(CachedAttention):
    """Chooses the tokens that each token attends to, with small heads and a cache of keys of its own.

    Every rank has all of it. In DeepSeek-V3.2 its products are a seventeenth of those of attention to all
    tokens, and ranks with some heads each would have to add up scores of all pairs of tokens to choose.
    """

    def __init__(self, size: int, spec: IndexerSpec) -> None:
        super().__init__()
        order = Pairs(spec.width, spec.rope, leading=True) if spec.turns_neighbours else None
        queries, width = Span.whole(spec.heads * spec.width), Span.whole(spec.width)
        self.spec = spec
        self.wq_b = Linear(spec.query_rank, [queries], sources=["wq_b"], orders=[order])
        self.wk = Linear(size, [width], sources=["wk"], orders=[order], plain=True)
        self.k_norm = LayerNorm(spec.width, _EPS, order=order)
        self.weights_proj = Linear(size, spec.heads, plain=True)
        self.kv: Tensor | None = None  # [blocks, block_size, width]

    def cache_shape(self, blocks: int, block_size: int) -> tuple[int, ...]:
        return blocks, block_size, self.spec.width

    def cache_parts(self) -> list[Tensor]:
        return [self.bound()]

    def step_bytes(self, tokens: int, positions: int, chunk: int, itemsize: int) -> int:
        spec = self.spec
        prepared = tokens * (3 * spec.heads * spec.width * itemsize + 4 * (spec.heads + spec.most))
        # In float32: the keys of a sequence, products and scores of some tokens, which are also put in order.
        some = max(1, min(chunk, (1 << 24) // (spec.heads * max(1, positions))))
        return prepared + 4 * positions * (spec.width + some * (2 * spec.heads + 8))

    def forward(self, x: Tensor, q: Tensor, cos_sin: Tensor | None) -> Tensor:
        """x [T, size], q [T, query_rank] -> [T, most] int32, as `ops.choose_tokens` has it."""
        return ops.choose_tokens(
            self.wq_b(q).view(len(x), self.spec.heads, self.spec.width),
            self.k_norm(self.wk(x)),
            ops.linear(x, self.weights_proj.weight, wide=True),
            self.bound(),
            context(self.group),
            cos_sin,
            most=self.spec.most,
        )


class LatentAttention(CachedAttention):
    """The heads of one layer that this rank holds, over a cache of latents that every rank has whole."""

    up: nn.Parameter

    def __init__(self, heads: Span, spec: LatentSpec, *, scale: float) -> None:
        super().__init__()
        self.heads = heads
        self.spec = spec
        self.scale = scale
        self.kv: Tensor | None = None  # [blocks, block_size, rank + rope]

    def pull(self, weights: Weights) -> None:
        spec, each = self.spec, self.spec.nope + self.spec.value
        shape, cut = (self.heads.size * each, spec.rank), cut_of(0, self.heads.times(each))
        scope = weights.sibling("kv_b_proj")
        matrix = read_plain_matrix(scope, shape, cut, scope.dtype)
        self.up = frozen(ops.pack_latent(matrix, self.heads.length, spec.nope, spec.rank))

    def cache_shape(self, blocks: int, block_size: int) -> tuple[int, ...]:
        return blocks, block_size, self.spec.rank + self.spec.rope

    def cache_parts(self) -> list[Tensor]:
        return [self.bound()]

    def step_bytes(self, tokens: int, positions: int, chunk: int, itemsize: int) -> int:
        spec, heads = self.spec, self.heads.length
        width, row = spec.nope + spec.rope + spec.value, spec.rank + spec.rope
        prepared = tokens * 3 * (heads * width + row) * itemsize
        # In float32: the rows of one sequence, keys and values of some of them, scores, and what is added up.
        piece = min(_MOST_ROWS, positions)
        made = 2 * piece * heads * width
        scores = 3 * heads * max(16 * chunk, min(piece * chunk, 1 << 24))
        chosen = 0 if spec.indexer is None else 4 * tokens * spec.indexer.most + 2 * chunk * positions
        return prepared + chosen + 4 * (positions * row + made + scores + 3 * chunk * heads * width)

    def forward(self, q: Tensor, latent: Tensor, cos_sin: Tensor | None) -> Tensor:
        """q [T, heads * (nope + rope)], latent [T, rank + rope], its key behind it -> [T, heads * value]."""
        tokens, spec, step = len(q), self.spec, context(self.group)
        out = ops.latent_attention(
            q.view(tokens, self.heads.length, spec.nope + spec.rope),
            latent,
            self.up,
            self.bound(),
            step,
            cos_sin,
            scale=self.scale,
            chosen=step.chosen,
        )  # [T, heads, value]
        return out.flatten(1)


class LatentSelfAttention(nn.Module):
    """Latent attention with its projections: hidden states [T, H] -> [T, H].

    The small matrices, those that make latents, are not quantized while they are loaded.
    """

    ignored = ("rotary_emb.inv_freq",)  # old checkpoints carry the rope frequencies

    def __init__(
        self,
        size: int,
        heads: int,
        spec: LatentSpec,
        parallel: Parallel,
        *,
        scale: float,
        growth: QueryGrowth | None = None,
        shares_choice: bool = False,
    ) -> None:
        """`shares_choice`: what an earlier layer's indexer chose is read, and there is none here."""
        super().__init__()
        share, width = parallel.share_heads(heads), spec.nope + spec.rope
        of_heads, of_row = None, None
        if spec.turns_neighbours:
            of_heads, of_row = Pairs(width, spec.rope), Pairs(spec.rank + spec.rope, spec.rope)
        row = Span.whole(spec.rank + spec.rope)
        if spec.query_rank is None:
            self.kv_a_proj = Linear(
                size, [row], bias=spec.bias, sources=["kv_a_proj_with_mqa"], orders=[of_row], plain=True
            )
            inputs, source = size, "q_proj"
        else:
            self.qkv_a_proj = Linear(
                size,
                [Span.whole(spec.query_rank), row],
                bias=spec.bias,
                sources=["q_a_proj", "kv_a_proj_with_mqa"],
                orders=[None, of_row],
                plain=True,
            )
            self.q_a_layernorm = RMSNorm(spec.query_rank, _EPS)
            inputs, source = spec.query_rank, "q_b_proj"
        self.kv_a_layernorm = FrontRMSNorm(spec.rank, _EPS)
        self.queries = Linear(inputs, [share.times(width)], sources=[source], orders=[of_heads])
        self.attention = LatentAttention(share, spec, scale=scale)
        self.o_proj = RowLinear(share.times(spec.value), size, parallel, bias=spec.bias)
        self.compresses = spec.query_rank is not None
        self.growth = growth
        self.indexer = None
        if spec.indexer is not None and not shares_choice:
            self.indexer = TokenIndexer(size, spec.indexer)

    def forward(self, x: Tensor, cos_sin: Tensor | None) -> Tensor:
        if self.compresses:
            q, latent = self.qkv_a_proj(x).split(self.qkv_a_proj.widths, dim=-1)
            q = self.q_a_layernorm(q)
        else:
            q, latent = x, self.kv_a_proj(x)
        latent = self.kv_a_layernorm(latent)
        if self.indexer is not None:
            context().chosen = self.indexer(x, q, cos_sin)
        q = self.queries(q)
        if self.growth is not None:
            q = self.growth.of(q)
        return self.o_proj(self.attention(q, latent, cos_sin))
