"""DeBERTa v2 and v3: BERT's layers, whose scores also compare tokens with learned distances, both ways."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, ModelConfig, family_fields
from models.context import context
from models.families.encoders.encoder import Embeddings, Encoder, EncoderFields, EncoderLayer, LayerNames
from models.families.encoders.encoder_model import BERT_NAMES, Head, encoder_classes
from models.layers.linear import Linear, frozen
from models.layers.mlp import MLP, activation_kind
from models.layers.norm import LayerNorm
from models.model import ModelSetup
from models.ops.encoder_ops import Distances

_NAMES = LayerNames(
    qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    mlp_norm="output.LayerNorm",
    mlp_parts=("intermediate.dense", "output.dense"),
)


class DebertaFields(EncoderFields, frozen=True, kw_only=True):
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-7
    relative_attention: bool = False
    position_buckets: int = -1
    max_relative_positions: int = -1
    position_biased_input: bool = True
    pos_att_type: str | tuple[str, ...] | None = None
    share_att_key: bool = False
    norm_rel_ebd: str = "none"
    conv_kernel_size: int = 0
    conv_act: str = "tanh"
    conv_groups: int = 1
    embedding_size: int | None = None
    pooler_hidden_act: str = "gelu"

    @property
    def reach(self) -> int:
        """The distance beyond which all are alike."""
        return (
            self.max_relative_positions if self.max_relative_positions > 0 else self.max_position_embeddings
        )

    @property
    def span(self) -> int:
        """Half of the learned distances: those of keys that stand before the query."""
        return self.position_buckets if self.position_buckets > 0 else self.reach

    @property
    def kinds(self) -> set[str]:
        """The comparisons that count: of a query with distances (c2p), of a key with them (p2c)."""
        named = self.pos_att_type or ()
        return {kind.strip() for kind in (named.lower().split("|") if isinstance(named, str) else named)}


def deberta_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, DebertaFields)
    _check(config, fields)
    positions = fields.max_position_embeddings if fields.position_biased_input else 0
    embeddings = Embeddings(setup, config.hidden_size, positions=positions, types=fields.type_vocab_size)
    layers = {f"encoder.layer.{index}": DebertaLayer(setup, fields) for index in range(config.num_layers)}
    return DebertaEncoder(setup, fields, embeddings, layers)


def _check(config: ModelConfig, fields: DebertaFields) -> None:
    for name, is_served, why in (
        ("relative_attention", fields.relative_attention, "must be true"),
        ("pos_att_type", fields.kinds and fields.kinds <= {"c2p", "p2c"}, "must have 'c2p', 'p2c' or both"),
        ("norm_rel_ebd", fields.norm_rel_ebd in ("none", "layer_norm"), "must be 'none' or 'layer_norm'"),
        ("embedding_size", fields.embedding_size in (None, config.hidden_size), "must be that of layers"),
        ("pooler_hidden_act", fields.pooler_hidden_act == "gelu", "must be 'gelu'"),
    ):
        if not is_served:
            raise ConfigError(f"config.json of this {config.architecture}: {name!r} {why}")


class DebertaEncoder(Encoder):
    """The trunk; the learned distances are rows that each layer brings into its own heads once."""

    def __init__(
        self,
        setup: ModelSetup,
        fields: DebertaFields,
        embeddings: Embeddings,
        layers: dict[str, DebertaLayer],
    ) -> None:
        distances = LearnedDistances(setup.config.hidden_size, fields)
        super().__init__(setup, embeddings, layers, eps=fields.layer_norm_eps, bias=distances)
        here = 0 in self.order and fields.conv_kernel_size > 0
        self.conv = Convolution(setup.config.hidden_size, fields) if here else None

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        if self.conv is not None:
            load(self.conv, weights / "encoder.conv")
        else:
            weights.ignore("encoder.conv")
        assert self.bias is not None
        rows = self.bias()
        for layer in self.layers:
            if isinstance(layer, DebertaLayer):  # one that this stage holds
                layer.place(rows)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        hidden = self._embed(ids, positions) if stream is None else stream  # [T, H]
        for index in self.order:
            given, hidden = hidden, self.layers[index](hidden, None, None)
            if index == 0 and self.conv is not None:
                hidden = self.conv(given, hidden)
        return hidden


class LearnedDistances(nn.Module):
    """The rows [2 * span, H] of the learned distances, as all layers read them."""

    rows: nn.Parameter

    def __init__(self, size: int, fields: DebertaFields) -> None:
        super().__init__()
        self.shape = (2 * fields.span, size)
        self.norm = LayerNorm(size, fields.layer_norm_eps) if fields.norm_rel_ebd == "layer_norm" else None

    def pull(self, weights: Weights) -> None:
        self.rows = frozen((weights / "encoder.rel_embeddings").take("weight", self.shape))
        if self.norm is not None:
            load(self.norm, weights / "encoder.LayerNorm")

    def forward(self) -> Tensor:
        return self.rows if self.norm is None else self.norm(self.rows)


class DebertaLayer(EncoderLayer):
    distances: Distances

    def __init__(self, setup: ModelSetup, fields: DebertaFields) -> None:
        size, parallel = setup.config.hidden_size, setup.parallel
        mlp = MLP(
            *(size, fields.intermediate_size, parallel),
            activation=fields.hidden_act,
            names=_NAMES.mlp_parts,
            bias=True,
        )
        super().__init__(setup, _NAMES, mlp, eps=fields.layer_norm_eps)
        self.kinds, self.head_dim = fields.kinds, setup.config.head_dim
        self.scale = ((len(fields.kinds) + 1) * self.head_dim) ** -0.5
        self.order_of = _rows_by_distance(fields, setup.max_len)
        share = self.qkv.outputs[0]
        self.apart = nn.ModuleDict()
        """What brings distances into the heads, where it is not what does so with tokens."""
        if not fields.share_att_key:
            named = (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj"))
            self.apart.update(
                {name: Linear(size, share, bias=True) for kind, name in named if kind in self.kinds}
            )

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        for name, layer in self.apart.items():
            load(layer, weights / f"attention.self.{name}")

    def place(self, rows: Tensor) -> None:
        """Brings the learned distances into the heads."""
        if self.apart:
            keys, queries = (
                self.apart[name](rows) if name in self.apart else None
                for name in ("pos_key_proj", "pos_query_proj")
            )
        else:
            queries, keys, _ = self.qkv(rows).split(self.qkv.widths, dim=-1)
        self.distances = Distances(
            self._heads(keys) if "c2p" in self.kinds else None,
            self._heads(queries) if "p2c" in self.kinds else None,
            self.order_of,
        )

    def _heads(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.view(len(rows), -1, self.head_dim).transpose(0, 1).contiguous()

    def forward(self, hidden: Tensor, cos_sin: Tensor | None, bias: Tensor | None) -> Tensor:
        q, k, v = (x.view(len(x), -1, self.head_dim) for x in self.qkv(hidden).split(self.qkv.widths, dim=-1))
        heads = ops.disentangled_attention(q, k, v, context(), self.distances, scale=self.scale)
        hidden, _ = self.attention_norm.add(self.out(heads.flatten(1)), hidden)  # [T, H], here and below
        return self.mlp_norm.add(self.mlp(hidden), hidden)[0]


class Convolution(nn.Module):
    """Adds a convolution over the embeddings of each text to the first layer's result."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, size: int, fields: DebertaFields) -> None:
        super().__init__()
        self.size, self.width, self.groups = size, fields.conv_kernel_size, fields.conv_groups
        self.kind = fields.conv_act
        self.norm = LayerNorm(size, fields.layer_norm_eps)

    def pull(self, weights: Weights) -> None:
        scope = weights / "conv"
        self.weight = frozen(scope.take("weight", (self.size, self.size // self.groups, self.width)))
        self.bias = frozen(scope.take("bias", (self.size,)))
        load(self.norm, weights / "LayerNorm")

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        texts = embedded.split(context().query_lens_host)
        found = torch.cat([self._of_text(text) for text in texts])
        found = found.tanh() if self.kind == "tanh" else ops.activation(found, activation_kind(self.kind))
        return self.norm.add(found, hidden)[0]

    def _of_text(self, text: Tensor) -> Tensor:
        padding = (self.width - 1) // 2
        return F.conv1d(text.t()[None], self.weight, self.bias, padding=padding, groups=self.groups)[0].t()


def _rows_by_distance(fields: DebertaFields, longest: int) -> Tensor:
    """[2 * longest - 1]: the row of the learned distances for each distance of a query from a key.

    Near ones have a row each, and farther ones share rows, more of them the farther they are.
    """
    distance = torch.arange(1 - longest, longest)
    if fields.position_buckets > 0 and fields.reach > 0:
        middle = fields.position_buckets // 2
        away = distance.abs().clamp(min=middle - 1)
        grown = torch.log(away / middle) / math.log((fields.reach - 1) / middle) * (middle - 1)
        far = (grown.ceil() + middle) * distance.sign()
        distance = torch.where(away <= middle, distance, far.long())
    return (distance + fields.span).clamp(0, 2 * fields.span - 1).int()


DebertaModel, DebertaForSequenceClassification, DebertaForTokenClassification = encoder_classes(
    "Deberta",
    deberta_trunk,
    partial(Head, dense=("pooler.dense",), activation=F.gelu),
    prefix=("deberta",),
    heads=("classifier", "pooler", "cls", "lm_predictions", "mask_predictions"),
    vocabulary=BERT_NAMES,
    hides_tokens=False,
)
