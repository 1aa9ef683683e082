"""DistilBERT: BERT with half the layers, and no token types."""

from __future__ import annotations

from functools import partial

import msgspec
import torch.nn.functional as F

from models.config import Size, family_fields
from models.families.encoders.encoder import Embeddings, Encoder, LayerNames, plain_layers
from models.families.encoders.encoder_model import Head, encoder_classes
from models.families.encoders.vocabulary_head import VocabularyNames
from models.model import ModelSetup

_EPS = 1e-12
_NAMES = LayerNames(
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    mlp="ffn",
    mlp_norm="output_layer_norm",
    mlp_parts=("lin1", "lin2"),
)


class DistilBertFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that ModelConfig lacks."""

    hidden_dim: Size
    max_position_embeddings: int = 512
    activation: str = "gelu"


def distilbert_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, DistilBertFields)
    embeddings = Embeddings(setup, config.hidden_size, positions=fields.max_position_embeddings)
    scopes = [f"transformer.layer.{index}" for index in range(config.num_layers)]
    inner, kind = fields.hidden_dim, fields.activation
    layers = plain_layers(setup, scopes, _NAMES, inner=inner, activation=kind, eps=_EPS)
    return Encoder(setup, embeddings, layers, eps=_EPS)


DistilBertModel, DistilBertForSequenceClassification, DistilBertForTokenClassification = encoder_classes(
    "DistilBert",
    distilbert_trunk,
    partial(Head, dense=("pre_classifier",), activation=F.relu),
    prefix=("distilbert",),
    heads=("vocab_transform", "vocab_layer_norm", "vocab_projector", "pre_classifier", "classifier"),
    vocabulary=VocabularyNames(
        dense="vocab_transform",
        norm=("vocab_layer_norm",),
        decoder="vocab_projector",
        bias=("vocab_projector.bias",),
        eps=_EPS,
    ),
)
