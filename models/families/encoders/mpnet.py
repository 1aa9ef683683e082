"""MPNet: RoBERTa's layers and positions, and a learned bias of attention for each distance."""

from __future__ import annotations

import math
from functools import partial

import msgspec
import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights
from models.config import Eps, ModelConfig, Size, family_fields
from models.families.encoders.encoder import MLP, Embeddings, Encoder, EncoderLayer, LayerNames
from models.families.encoders.encoder_model import Head, encoder_classes
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
)


class MPNetFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that ModelConfig lacks."""

    intermediate_size: Size = 3072
    max_position_embeddings: int = 512
    hidden_act: str = "gelu"
    layer_norm_eps: Eps = 1e-12


def mpnet_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, MPNetFields)
    embeddings = Embeddings(
        setup,
        config.hidden_size,
        positions=fields.max_position_embeddings,
        first_position=_FIRST_POSITION,
    )
    layers = {f"encoder.layer.{index}": _layer(setup, fields) for index in range(config.num_layers)}
    bias = DistanceBias(config, setup.parallel)
    return Encoder(setup, embeddings, layers, eps=fields.layer_norm_eps, bias=bias)


def _layer(setup: ModelSetup, fields: MPNetFields) -> EncoderLayer:
    mlp = MLP(
        setup.config.hidden_size,
        fields.intermediate_size,
        setup.parallel,
        activation=fields.hidden_act,
        names=("intermediate.dense", "output.dense"),
        bias=True,
    )
    return EncoderLayer(setup, _NAMES, mlp, eps=fields.layer_norm_eps)


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
)
