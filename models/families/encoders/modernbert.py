"""ModernBERT: norms ahead of attention and MLP, rotary positions, and windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.config import ConfigError, Eps, ModelConfig, Size, family_fields
from models.families.encoders.encoder_model import Head, VocabularyNames, encoder_classes
from models.layers.attention import EncoderAttention
from models.layers.embedding import Embedding
from models.layers.linear import Linear, RowLinear
from models.layers.mlp import GatedMLP, activation_kind
from models.layers.norm import LayerNorm
from models.layers.rotary import Rope, Rotary, read_rope
from models.layers.stages import Layers, if_held
from models.model import ModelSetup
from models.ops.attention_inputs import HeadPrep

_NEAR, _FAR = "sliding_attention", "full_attention"


class ModernBertFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that ModelConfig lacks."""

    intermediate_size: Size
    hidden_activation: str = "gelu"
    norm_eps: Eps = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: tuple[str, ...] | None = None
    global_attn_every_n_layers: int = 3
    """The number of layers of which the first has no window, where there are no `layer_types`."""
    local_attention: int = 128
    """The number of positions that a window covers, half of them on each side."""
    global_rope_theta: float = 160000.0
    local_rope_theta: float | None = 10000.0
    """The base of the rotation in layers with a window; None means that of the others."""
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_activation: str = "gelu"
    classifier_bias: bool = False


class ModernBert(nn.Module):
    """The trunk: token ids -> hidden states. A stage does its part of that."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        config, fields = setup.config, family_fields(setup.config, ModernBertFields)
        parallel, kinds = setup.parallel, _kinds(config, fields)
        ropes = {kind: _rope(setup, fields, kind) for kind in dict.fromkeys(kinds)}
        self.embeddings = if_held(parallel.first, ModernBertEmbeddings(setup, fields))
        self.layers = Layers(
            len(kinds), parallel, lambda number: ModernBertLayer(setup, fields, number, kinds[number])
        )
        self.final_norm = if_held(parallel.last, _norm(config, fields))
        self.rotaries = nn.ModuleDict({kind: Rotary(rope) for kind, rope in ropes.items()})

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        rotations = {kind: rotary(positions) for kind, rotary in self.rotaries.items()}
        hidden = self.embeddings(ids) if stream is None else stream  # [T, H]
        for layer in self.layers:
            hidden = layer(hidden, rotations)
        return self.final_norm(hidden)


class ModernBertEmbeddings(nn.Module):
    def __init__(self, setup: ModelSetup, fields: ModernBertFields) -> None:
        super().__init__()
        config = setup.config
        self.tok_embeddings = Embedding(config.vocab_size, config.hidden_size, setup.parallel)
        self.norm = _norm(config, fields)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(ids))


class ModernBertLayer(nn.Module):
    def __init__(self, setup: ModelSetup, fields: ModernBertFields, index: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        # The first layer's input has passed a norm already.
        self.attn_norm = _norm(setup.config, fields) if index else nn.Identity()
        self.attn = ModernBertAttention(setup, fields, kind)
        self.mlp_norm = _norm(setup.config, fields)
        self.mlp = GatedMLP(
            setup.config.hidden_size,
            fields.intermediate_size,
            setup.parallel,
            activation=fields.hidden_activation,
            bias=fields.mlp_bias,
            names=("Wi", "Wo"),
        )

    def forward(self, hidden: Tensor, rotations: Mapping[str, Tensor]) -> Tensor:
        hidden = ops.add(hidden, self.attn(self.attn_norm(hidden), rotations[self.kind]))
        return ops.add(hidden, self.mlp(self.mlp_norm(hidden)))


class ModernBertAttention(nn.Module):
    def __init__(self, setup: ModelSetup, fields: ModernBertFields, kind: str) -> None:
        super().__init__()
        config, parallel = setup.config, setup.parallel
        share = parallel.share_heads(config.num_heads).times(config.head_dim)
        self.Wqkv = Linear(config.hidden_size, [share, share, share], bias=fields.attention_bias)
        self.Wo = RowLinear(share, config.hidden_size, parallel, bias=fields.attention_bias)
        window = fields.local_attention // 2 if kind == _NEAR else None
        self.attention = EncoderAttention(
            head_dim=config.head_dim, scale=config.head_dim**-0.5, window=window
        )

    def forward(self, hidden: Tensor, cos_sin: Tensor) -> Tensor:
        q, k, v = self.Wqkv(hidden).split(self.Wqkv.widths, dim=-1)  # [T, heads * D] each
        return self.Wo(self.attention(q, k, v, HeadPrep(cos_sin)))


def _head(setup: ModelSetup) -> Head:
    """A dense layer, a norm and a classifier."""
    fields = family_fields(setup.config, ModernBertFields)
    kind = activation_kind(fields.classifier_activation)
    size = setup.config.hidden_size
    norm = LayerNorm(size, fields.norm_eps, bias=fields.norm_bias, dtype=torch.float32)
    head = Head(
        setup,
        dense=("head.dense",),
        dense_bias=fields.classifier_bias,
        activation=partial(ops.activation, kind=kind),
        norm=("head.norm", norm),
    )
    head.default_pooling = "MEAN" if fields.classifier_pooling == "mean" else "CLS"
    return head


def _vocabulary(setup: ModelSetup) -> VocabularyNames:
    fields = family_fields(setup.config, ModernBertFields)
    return VocabularyNames(
        dense="head.dense",
        norm=("head.norm",),
        decoder="decoder",
        bias=("decoder.bias",),
        activation=fields.classifier_activation,
        eps=fields.norm_eps,
        dense_bias=fields.classifier_bias,
        norm_bias=fields.norm_bias,
    )


def _norm(config: ModelConfig, fields: ModernBertFields) -> LayerNorm:
    return LayerNorm(config.hidden_size, fields.norm_eps, bias=fields.norm_bias)


def _kinds(config: ModelConfig, fields: ModernBertFields) -> tuple[str, ...]:
    """The kind of each layer: with a window or without."""
    if fields.layer_types is None:
        every = fields.global_attn_every_n_layers
        return tuple(_NEAR if index % every else _FAR for index in range(config.num_layers))
    unknown = sorted(set(fields.layer_types) - {_NEAR, _FAR})
    if unknown or len(fields.layer_types) != config.num_layers:
        raise ConfigError(
            f"config.json of this {config.architecture}: 'layer_types' must say {_NEAR} or {_FAR} "
            f"for each of the {config.num_layers} layers"
        )
    return fields.layer_types


def _rope(setup: ModelSetup, fields: ModernBertFields, kind: str) -> Rope:
    config, theta = setup.config, fields.global_rope_theta
    if kind == _NEAR and fields.local_rope_theta is not None:
        theta = fields.local_rope_theta
    return read_rope(config.raw, config.head_dim, setup.max_len, layer_type=kind, default_theta=theta)


ModernBertModel, ModernBertForSequenceClassification, ModernBertForTokenClassification = encoder_classes(
    "ModernBert",
    ModernBert,
    _head,
    prefix=("model",),
    heads=("head", "decoder", "classifier"),
    vocabulary=_vocabulary,
    token_head=_head,
)
