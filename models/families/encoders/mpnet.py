"""MPNet: RoBERTa's layers and positions, and a learned bias of attention for each distance."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from models.checkpoint.weights import Weights
from models.config import ModelConfig, Size, family_fields
from models.families.encoders.encoder import (
    Embeddings,
    Encoder,
    EncoderFields,
    LayerNames,
    plain_layers,
)
from models.families.encoders.encoder_model import Head, encoder_classes
from models.families.encoders.vocabulary_head import ROBERTA_NAMES
from models.layers.attention import Buckets, read_bias
from models.model import ModelSetup
from models.parallel.parallel import Parallel

_FIRST_POSITION = 2  # rows 0 and 1 of the position table were meant for padding
_NAMES = LayerNames(
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
    config, fields = setup.config, family_fields(setup.config, MPNetFields)
    positions = fields.max_position_embeddings
    embeddings = Embeddings(setup, config.hidden_size, positions=positions, first_position=_FIRST_POSITION)
    scopes = [f"encoder.layer.{index}" for index in range(config.num_layers)]
    inner, kind, eps = fields.intermediate_size, fields.hidden_act, fields.layer_norm_eps
    layers = plain_layers(setup, scopes, _NAMES, inner=inner, activation=kind, eps=eps)
    return Encoder(setup, embeddings, layers, eps=eps, bias=DistanceBias(config, setup.parallel))


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
