"""BERT, RoBERTa (with XLM-R and CamemBERT) and ELECTRA: the same layer, other positions, widths and heads."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F

from models.config import ConfigError, ModelConfig, family_fields
from models.families.encoders.encoder import (
    Embeddings,
    Encoder,
    EncoderFields,
    LayerNames,
    plain_layers,
)
from models.families.encoders.encoder_model import Head, encoder_classes
from models.families.encoders.rotary_roberta import is_rotary, rotary_trunk
from models.families.encoders.vocabulary_head import BERT_NAMES, ROBERTA_NAMES
from models.model import ModelSetup

_NAMES = LayerNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    mlp_norm="output.LayerNorm",
    mlp_parts=("intermediate.dense", "output.dense"),
)


class BertFields(EncoderFields, frozen=True, kw_only=True):
    pad_token_id: int = 0
    embedding_size: int | None = None
    """The width of embeddings that a projection brings to the layers' width."""
    position_embedding_type: str = "absolute"


def bert_fields(config: ModelConfig) -> BertFields:
    fields = family_fields(config, BertFields)
    if fields.position_embedding_type != "absolute":
        raise ConfigError(
            f"config.json of this {config.architecture}: the field 'position_embedding_type' is "
            f"{fields.position_embedding_type!r}, but only 'absolute' is served"
        )
    return fields


def bert_trunk(setup: ModelSetup, *, first_position: int = 0) -> Encoder:
    config, fields = setup.config, bert_fields(setup.config)
    width = fields.embedding_size or config.hidden_size
    embeddings = Embeddings(
        setup,
        width,
        positions=fields.max_position_embeddings,
        first_position=first_position,
        types=fields.type_vocab_size,
    )
    scopes = [f"encoder.layer.{index}" for index in range(config.num_layers)]
    inner, kind, eps = fields.intermediate_size, fields.hidden_act, fields.layer_norm_eps
    layers = plain_layers(setup, scopes, _NAMES, inner=inner, activation=kind, eps=eps)
    return Encoder(
        setup,
        embeddings,
        layers,
        eps=eps,
        width=width,
        project="embeddings_project" if width != config.hidden_size else "",
    )


def roberta_trunk(setup: ModelSetup) -> Encoder:
    """BERT's trunk with positions that begin after the row of the padding token, or with rotary ones."""
    if is_rotary(setup.config):
        return rotary_trunk(setup)
    return bert_trunk(setup, first_position=bert_fields(setup.config).pad_token_id + 1)


BertModel, BertForSequenceClassification, BertForTokenClassification = encoder_classes(
    "Bert",
    bert_trunk,
    partial(Head, dense=("bert.pooler.dense", "pooler.dense")),
    prefix=("bert",),
    heads=("cls", "classifier", "linear"),
    vocabulary=BERT_NAMES,
)

RobertaModel, RobertaForSequenceClassification, RobertaForTokenClassification = encoder_classes(
    "Roberta",
    roberta_trunk,
    partial(Head, dense=("classifier.dense",), out="classifier.out_proj"),
    prefix=("roberta",),
    heads=("lm_head", "classifier"),
    vocabulary=ROBERTA_NAMES,
)

ElectraModel, ElectraForSequenceClassification, ElectraForTokenClassification = encoder_classes(
    "Electra",
    bert_trunk,
    partial(Head, dense=("classifier.dense",), activation=F.gelu, out="classifier.out_proj"),
    prefix=("electra",),
    heads=("generator_predictions", "generator_lm_head", "discriminator_predictions", "classifier"),
)
