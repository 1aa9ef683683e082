"""MPNet: RoBERTa's layers and positions, and a learned bias of attention for each distance."""

from __future__ import annotations

import math
from functools import partial

import torch
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
from models.layers.linear import frozen
from models.model import ModelSetup
from models.parallel.parallel import Parallel
from models.weight_pieces import Cut

_FIRST_POSITION = 2  # rows 0 and 1 of the position table were meant for padding
_BUCKETS = 32
_REACH = 128
"""The distance beyond which all keys share the last bucket of their side."""
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
    """Biases of attention by distance and head, spread from the checkpoint's buckets of distances."""

    table: nn.Parameter  # [heads of this rank, 2 * _REACH + 1] float32, as kernels read it

    def __init__(self, config: ModelConfig, parallel: Parallel) -> None:
        super().__init__()
        self.heads = parallel.share_heads(config.num_heads)

    def pull(self, weights: Weights) -> None:
        heads = self.heads
        cut = None if heads.is_whole else Cut(1, heads.start, heads.stop)
        scope = weights / "encoder.relative_attention_bias"
        values = scope.take("weight", [_BUCKETS, heads.size], cut)  # [buckets, heads]
        buckets = _buckets(torch.arange(-_REACH, _REACH + 1))
        self.table = frozen(values[buckets.to(values.device)].t().float().contiguous())

    def forward(self) -> Tensor:
        return self.table


def _buckets(distance: Tensor) -> Tensor:
    """The bucket of each distance: half of the buckets are for keys that stand after the query.

    Within a half, the first half of the buckets have one distance each, and the others grow like a logarithm.
    """
    half = _BUCKETS // 2
    near = half // 2
    away = distance.abs()
    grown = torch.log(away.float() / near) / math.log(_REACH / near) * (half - near)
    far = (near + grown.clamp(min=0).long()).clamp(max=half - 1)
    return torch.where(distance > 0, half, 0) + torch.where(away < near, away, far)


MPNetModel, MPNetForSequenceClassification, MPNetForTokenClassification = encoder_classes(
    "MPNet",
    mpnet_trunk,
    partial(Head, dense=("classifier.dense",), out="classifier.out_proj"),
    prefix=("mpnet",),
    heads=("lm_head", "classifier"),
    vocabulary=ROBERTA_NAMES,
)
