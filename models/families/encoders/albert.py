"""ALBERT: a few layers, each of which runs several times, and embeddings narrower than the layers."""

from __future__ import annotations

from functools import partial

from models.config import family_fields
from models.families.encoders.encoder import (
    Embeddings,
    Encoder,
    EncoderFields,
    LayerNames,
    plain_layers,
)
from models.families.encoders.encoder_model import Head, encoder_classes
from models.families.encoders.vocabulary_head import VocabularyNames
from models.model import ModelSetup

_NAMES = LayerNames(
    qkv=("attention.query", "attention.key", "attention.value"),
    out="attention.dense",
    attention_norm="attention.LayerNorm",
    mlp_norm="full_layer_layer_norm",
    mlp_parts=("ffn", "ffn_output"),
)


class AlbertFields(EncoderFields, frozen=True, kw_only=True):
    embedding_size: int = 128
    hidden_act: str = "gelu_new"
    num_hidden_groups: int = 1
    inner_group_num: int = 1
    """The number of layers in a group, which run one after the other."""


def albert_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, AlbertFields)
    embeddings = Embeddings(
        setup, fields.embedding_size, positions=fields.max_position_embeddings, types=fields.type_vocab_size
    )
    scopes = [
        f"encoder.albert_layer_groups.{group}.albert_layers.{index}"
        for group in range(fields.num_hidden_groups)
        for index in range(fields.inner_group_num)
    ]
    inner, kind, eps = fields.intermediate_size, fields.hidden_act, fields.layer_norm_eps
    layers = plain_layers(setup, scopes, _NAMES, inner=inner, activation=kind, eps=eps)
    groups = (step * fields.num_hidden_groups // config.num_layers for step in range(config.num_layers))
    size = fields.inner_group_num
    return Encoder(
        setup,
        embeddings,
        layers,
        eps=eps,
        width=fields.embedding_size,
        project="encoder.embedding_hidden_mapping_in",
        order=[group * size + index for group in groups for index in range(size)],
    )


AlbertModel, AlbertForSequenceClassification, AlbertForTokenClassification = encoder_classes(
    "Albert",
    albert_trunk,
    partial(Head, dense=("albert.pooler", "pooler")),
    prefix=("albert",),
    heads=("predictions", "sop_classifier", "classifier"),
    vocabulary=VocabularyNames(
        dense="predictions.dense",
        norm=("predictions.LayerNorm",),
        decoder="predictions.decoder",
        bias=("predictions.bias",),
    ),
)
