"""BERT and its kin, which have one layer, and other names, positions, widths and heads: RoBERTa (with XLM-R
and CamemBERT), ELECTRA, ALBERT, DistilBERT and MPNet."""

from __future__ import annotations

from functools import partial

import msgspec
import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint.weights import Weights
from models.config import ModelConfig, Size, check_served, family_fields
from models.families.encoders.encoder import (
    Embeddings,
    Encoder,
    EncoderFields,
    LayerNames,
    plain_layers,
)
from models.families.encoders.encoder_model import (
    BERT_NAMES,
    ROBERTA_NAMES,
    Head,
    VocabularyNames,
    encoder_classes,
)
from models.families.encoders.rotary_roberta import is_rotary, rotary_trunk
from models.layers.attention import Buckets, read_bias
from models.model import ModelSetup
from models.parallel.parallel import Parallel

_BERT = LayerNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    mlp_norm="output.LayerNorm",
    mlp_parts=("intermediate.dense", "output.dense"),
)


class BertFields(EncoderFields, frozen=True, kw_only=True):
    pad_token_id: int | None = None
    embedding_size: int | None = None
    """The width of embeddings that a projection brings to the layers' width."""
    position_embedding_type: str = "absolute"


def bert_fields(config: ModelConfig) -> BertFields:
    fields = family_fields(config, BertFields)
    check_served(config, fields, position_embedding_type=("absolute",))
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
    return Encoder(
        setup,
        embeddings,
        plain_layers(setup, fields, _BERT),
        eps=fields.layer_norm_eps,
        width=width,
        project="embeddings_project" if width != config.hidden_size else "",
    )


def roberta_trunk(setup: ModelSetup) -> Encoder:
    """BERT's trunk with positions that begin after the row of the padding token, or with rotary ones."""
    if is_rotary(setup.config):
        return rotary_trunk(setup)
    padding = bert_fields(setup.config).pad_token_id
    return bert_trunk(setup, first_position=(1 if padding is None else padding) + 1)


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


_ALBERT = LayerNames(
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
    """A few layers, each of which runs several times, and embeddings narrower than the layers."""
    config, fields = setup.config, family_fields(setup.config, AlbertFields)
    embeddings = Embeddings(
        setup, fields.embedding_size, positions=fields.max_position_embeddings, types=fields.type_vocab_size
    )
    scopes = [
        f"encoder.albert_layer_groups.{group}.albert_layers.{index}"
        for group in range(fields.num_hidden_groups)
        for index in range(fields.inner_group_num)
    ]
    groups = (step * fields.num_hidden_groups // config.num_layers for step in range(config.num_layers))
    size = fields.inner_group_num
    return Encoder(
        setup,
        embeddings,
        plain_layers(setup, fields, _ALBERT, scopes),
        eps=fields.layer_norm_eps,
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


_DISTILBERT = LayerNames(
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    mlp="ffn",
    mlp_norm="output_layer_norm",
    mlp_parts=("lin1", "lin2"),
)


class DistilBertFields(EncoderFields, frozen=True, kw_only=True):
    intermediate_size: Size = msgspec.field(name="hidden_dim")
    max_position_embeddings: int = 512
    hidden_act: str = msgspec.field(name="activation", default="gelu")


def distilbert_trunk(setup: ModelSetup) -> Encoder:
    """BERT with half the layers, and no token types."""
    config, fields = setup.config, family_fields(setup.config, DistilBertFields)
    embeddings = Embeddings(setup, config.hidden_size, positions=fields.max_position_embeddings)
    layers = plain_layers(setup, fields, _DISTILBERT, "transformer.layer.")
    return Encoder(setup, embeddings, layers, eps=fields.layer_norm_eps)


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
        eps=1e-12,
    ),
)


_MPNET_FIRST = 2  # rows 0 and 1 of the position table were meant for padding
_MPNET = LayerNames(
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    mlp_norm="output.LayerNorm",
    mlp_parts=("intermediate.dense", "output.dense"),
)


class MPNetFields(EncoderFields, frozen=True, kw_only=True):
    intermediate_size: Size = 3072
    max_position_embeddings: int = 512


def mpnet_trunk(setup: ModelSetup) -> Encoder:
    """RoBERTa's layers and positions, and a learned bias of attention for each distance."""
    config, fields = setup.config, family_fields(setup.config, MPNetFields)
    positions = fields.max_position_embeddings
    embeddings = Embeddings(setup, config.hidden_size, positions=positions, first_position=_MPNET_FIRST)
    layers, bias = plain_layers(setup, fields, _MPNET), DistanceBias(config, setup.parallel)
    return Encoder(setup, embeddings, layers, eps=fields.layer_norm_eps, bias=bias)


class DistanceBias(nn.Module):
    """Biases of attention by distance, which all layers share."""

    table: nn.Parameter

    def __init__(self, config: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        self.heads = parallel.share_heads(config.num_heads)

    def pull(self, weights: Weights) -> None:
        self.table = read_bias(weights / "encoder.relative_attention_bias", self.heads, Buckets())

    def forward(self) -> Tensor:
        return self.table


MPNetModel, MPNetForSequenceClassification, MPNetForTokenClassification = encoder_classes(
    "MPNet",
    mpnet_trunk,
    partial(Head, dense=("classifier.dense",), out="classifier.out_proj"),
    prefix=("mpnet",),
    heads=("lm_head", "classifier"),
    vocabulary=ROBERTA_NAMES,
)
