"""ALBERT: a few layers, each of which runs several times, and embeddings narrower than the layers."""

from __future__ import annotations

from functools import partial

import msgspec

from models.config import Eps, Size, family_fields
from models.families.encoders.encoder import MLP, Embeddings, Encoder, EncoderLayer, LayerNames
from models.families.encoders.encoder_model import Head, encoder_classes
from models.model import ModelSetup

_NAMES = LayerNames(
    qkv=("attention.query", "attention.key", "attention.value"),
    out="attention.dense",
    attention_norm="attention.LayerNorm",
    mlp_norm="full_layer_layer_norm",
)


class AlbertFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that ModelConfig lacks."""

    intermediate_size: Size
    max_position_embeddings: int
    embedding_size: int = 128
    type_vocab_size: int = 2
    hidden_act: str = "gelu_new"
    layer_norm_eps: Eps = 1e-12
    num_hidden_groups: int = 1
    inner_group_num: int = 1
    """The number of layers in a group, which run one after the other."""


def albert_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, AlbertFields)
    embeddings = Embeddings(
        setup, fields.embedding_size, positions=fields.max_position_embeddings, types=fields.type_vocab_size
    )
    layers = {
        f"encoder.albert_layer_groups.{group}.albert_layers.{index}": _layer(setup, fields)
        for group in range(fields.num_hidden_groups)
        for index in range(fields.inner_group_num)
    }
    groups = (step * fields.num_hidden_groups // config.num_layers for step in range(config.num_layers))
    size = fields.inner_group_num
    return Encoder(
        setup,
        embeddings,
        layers,
        eps=fields.layer_norm_eps,
        width=fields.embedding_size,
        project="encoder.embedding_hidden_mapping_in",
        order=[group * size + index for group in groups for index in range(size)],
    )


def _layer(setup: ModelSetup, fields: AlbertFields) -> EncoderLayer:
    mlp = MLP(
        setup.config.hidden_size,
        fields.intermediate_size,
        setup.parallel,
        activation=fields.hidden_act,
        names=("ffn", "ffn_output"),
        bias=True,
    )
    return EncoderLayer(setup, _NAMES, mlp, eps=fields.layer_norm_eps)


AlbertModel, AlbertForSequenceClassification, AlbertForTokenClassification = encoder_classes(
    "Albert",
    albert_trunk,
    partial(Head, dense=("albert.pooler", "pooler")),
    prefix=("albert",),
    heads=("predictions", "sop_classifier", "classifier"),
)
