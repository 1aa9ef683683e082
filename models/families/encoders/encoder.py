"""The encoder that BERT-like families share: layers of attention and an MLP, each followed by its norm.

Every text is computed whole, in one step. A family builds its layers in its own file, which also has the
names of their parts in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import Eps, Size
from models.context import context
from models.layers.attention import EncoderAttention
from models.layers.embedding import Embedding, check_learned_positions
from models.layers.linear import Linear, RowLinear
from models.layers.mlp import MLP
from models.layers.norm import LayerNorm
from models.layers.stages import if_held
from models.model import ModelSetup
from models.ops.attention_inputs import HeadPrep
from models.pooling.sentence_files import Mode


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """The names of a layer's parts in the checkpoint."""

    qkv: tuple[str, ...]
    """The names of queries, keys and values: three, or one if they are one matrix."""
    out: str
    attention_norm: str
    mlp: str = ""
    """The name of the MLP; empty if its parts lie beside those of attention."""
    mlp_norm: str
    mlp_parts: tuple[str, str] = ("", "")
    """The names of the MLP's two layers, if it is no gated one."""


class EncoderFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that most encoders have and ModelConfig lacks."""

    intermediate_size: Size
    max_position_embeddings: int
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    layer_norm_eps: Eps = 1e-12


class Embeddings(nn.Module):
    """The sum of a token's embedding and, if the family has them, those of its position and its type."""

    ignored = ("position_ids", "token_type_ids")  # constants that old checkpoints carry

    def __init__(
        self, setup: ModelSetup, width: int, *, positions: int = 0, first_position: int = 0, types: int = 0
    ) -> None:
        """`positions` is the length of the table of learned positions; texts begin at `first_position`."""
        super().__init__()
        if positions:
            check_learned_positions(setup.config.architecture, positions - first_position, setup.max_len)
        self.first_position = first_position
        self.word_embeddings = Embedding(setup.config.vocab_size, width, setup.parallel)
        undivided = setup.parallel.undivided
        self.position_embeddings = Embedding(positions, width, undivided, plain=True) if positions else None
        self.token_type_embeddings = Embedding(types, width, undivided, plain=True) if types else None

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.word_embeddings(ids)  # [T, width]
        if self.token_type_embeddings is not None:
            hidden = ops.add(hidden, self._types(self.token_type_embeddings.weight))
        if self.position_embeddings is not None:
            rows = self.position_embeddings.weight[self.first_position :]
            hidden = ops.add(hidden, ops.embed(positions, rows))
        return hidden

    def _types(self, rows: Tensor) -> Tensor:
        """The embeddings of the tokens' types [T, width], or [width] if all tokens have the same type."""
        types = context().token_types  # RoBERTa has one type, so it does not tell the texts of a pair apart
        return rows[0] if types is None or len(rows) == 1 else ops.embed(types, rows)


class EncoderLayer(nn.Module):
    def __init__(
        self,
        setup: ModelSetup,
        names: LayerNames,
        mlp: nn.Module,
        *,
        eps: float,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        config, parallel = setup.config, setup.parallel
        share = parallel.share_heads(config.num_heads).times(config.head_dim)
        self.names = names
        sources = names.qkv if len(names.qkv) > 1 else ()
        self.qkv = Linear(config.hidden_size, [share, share, share], bias=qkv_bias, sources=sources)
        self.out = RowLinear(share, config.hidden_size, parallel, bias=out_bias)
        self.attention = EncoderAttention(head_dim=config.head_dim, scale=config.head_dim**-0.5)
        self.attention_norm = LayerNorm(config.hidden_size, eps)
        self.mlp = mlp
        self.mlp_norm = LayerNorm(config.hidden_size, eps)

    def pull(self, weights: Weights) -> None:
        names = self.names
        load(self.qkv, weights / (names.qkv[0] if len(names.qkv) == 1 else "qkv"))
        load(self.out, weights / names.out)
        load(self.attention_norm, weights / names.attention_norm)
        load(self.mlp, weights / names.mlp)
        load(self.mlp_norm, weights / names.mlp_norm)

    def forward(self, hidden: Tensor, cos_sin: Tensor | None, bias: Tensor | None) -> Tensor:
        q, k, v = self.qkv(hidden).split(self.qkv.widths, dim=-1)  # [T, heads * D] each
        heads = self.attention(q, k, v, HeadPrep(cos_sin), bias=bias)
        hidden, _ = self.attention_norm.add(self.out(heads), hidden)  # [T, H], here and below
        return self.mlp_norm.add(self.mlp(hidden), hidden)[0]


def plain_layers(
    setup: ModelSetup,
    fields: EncoderFields,
    names: LayerNames,
    scopes: str | list[str] = "encoder.layer.",
) -> dict[str, EncoderLayer]:
    """Layers with biases everywhere, whose MLPs have no gate, by their scopes in the checkpoint.

    `scopes`: the scope of each layer, or what stands ahead of their numbers.
    """

    def layer() -> EncoderLayer:
        sizes = setup.config.hidden_size, fields.intermediate_size, setup.parallel
        mlp = MLP(*sizes, activation=fields.hidden_act, names=names.mlp_parts, bias=True)
        return EncoderLayer(setup, names, mlp, eps=fields.layer_norm_eps)

    if isinstance(scopes, str):
        scopes = [f"{scopes}{index}" for index in range(setup.config.num_layers)]
    return {scope: layer() for scope in scopes}


class Encoder(nn.Module):
    """The trunk: token ids -> hidden states. A stage does its part of that."""

    default_pooling: Mode = "CLS"
    """The way tokens are merged if neither the checkpoint nor the operator says, and there is no head."""

    def __init__(
        self,
        setup: ModelSetup,
        embeddings: Embeddings,
        layers: Mapping[str, EncoderLayer],
        *,
        eps: float,
        width: int | None = None,
        project: str = "",
        norm: str = "embeddings.LayerNorm",
        order: Sequence[int] = (),
        rotary: nn.Module | None = None,
        bias: nn.Module | None = None,
    ) -> None:
        """Build a trunk of `layers`, by their names in the checkpoint; `project` and `norm` are such names.

        `width` is the embeddings' width, if not that of the layers, to which `project` then brings them.
        `order` has the indices of the layers as they run, if some run again. `rotary` turns positions into
        cosines and sines, and `bias` gives the numbers that are added to scores by distance.
        """
        super().__init__()
        size = setup.config.hidden_size
        first = setup.parallel.first
        self.embeddings = if_held(first, embeddings)
        self.norm = if_held(first, LayerNorm(width or size, eps))
        self.project = if_held(first, Linear(width or size, size, bias=True)) if project else None
        self.rotary = rotary
        self.bias = bias
        self.names = {"norm": norm, "project": project}
        order = order or range(len(layers))
        self.order = [order[step] for step in setup.parallel.share_layers(len(order))]
        self.layers = nn.ModuleList(
            if_held(index in self.order, layer) for index, layer in enumerate(layers.values())
        )
        self.layer_names = list(layers)

    def pull(self, weights: Weights) -> None:
        load(self.embeddings, weights / "embeddings")
        load(self.norm, weights / self.names["norm"])
        if self.project is not None:
            load(self.project, weights / self.names["project"])
        for name, layer in zip(self.layer_names, self.layers, strict=True):
            load(layer, weights / name)
        for beside in (self.rotary, self.bias):
            if beside is not None:
                load(beside, weights)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        hidden = self._embed(ids, positions) if stream is None else stream  # [T, H]
        cos_sin = None if self.rotary is None else self.rotary(positions)
        bias = None if self.bias is None else self.bias()
        for index in self.order:
            hidden = self.layers[index](hidden, cos_sin, bias)  # [T, H]
        return hidden

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.norm(self.embeddings(ids, positions))  # [T, width]
        return hidden if self.project is None else self.project(hidden)
