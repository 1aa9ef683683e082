"""JinaBERT: BERT's attention with a bias that falls with distance in place of positions, and gated MLPs."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights
from models.config import ConfigError, ModelConfig, family_fields
from models.families.encoders.encoder import Embeddings, Encoder, EncoderFields, EncoderLayer, LayerNames
from models.families.encoders.encoder_model import Head, encoder_classes
from models.layers.attention import alibi_slopes
from models.layers.linear import frozen
from models.layers.mlp import GatedMLP
from models.model import ModelSetup

_NAMES = LayerNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    mlp="mlp",
    mlp_norm="mlp.layernorm",
)
_GATES = {"geglu": "gelu", "reglu": "relu"}
"""The activation of a gate by Jina's name for the kind of MLP."""


class JinaBertFields(EncoderFields, frozen=True, kw_only=True):
    position_embedding_type: str = "absolute"
    feed_forward_type: str = "original"


def jina_bert_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, JinaBertFields)
    _check(config, fields)
    embeddings = Embeddings(setup, config.hidden_size, types=fields.type_vocab_size)
    layers = {
        f"encoder.layer.{index}": EncoderLayer(setup, _NAMES, _mlp(setup, fields), eps=fields.layer_norm_eps)
        for index in range(config.num_layers)
    }
    return Encoder(setup, embeddings, layers, eps=fields.layer_norm_eps, bias=FallingBias(setup))


def _mlp(setup: ModelSetup, fields: JinaBertFields) -> GatedMLP:
    return GatedMLP(
        setup.config.hidden_size,
        fields.intermediate_size,
        setup.parallel,
        activation=_GATES[fields.feed_forward_type],
        down_bias=True,
        names=("gated_layers", "wo"),
    )


def _check(config: ModelConfig, fields: JinaBertFields) -> None:
    for name, value, served in (
        ("position_embedding_type", fields.position_embedding_type, ("alibi",)),
        ("feed_forward_type", fields.feed_forward_type, tuple(_GATES)),
    ):
        if value not in served:
            raise ConfigError(
                f"config.json of this {config.architecture}: the field {name!r} is {value!r}, but must be "
                f"{' or '.join(map(repr, served))}"
            )


class FallingBias(nn.Module):
    """Biases of attention by distance and head (alibi): nearer keys count more, on either side."""

    table: nn.Parameter  # [heads of this rank, 2 * longest - 1] float32

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        self.heads, self.longest = setup.parallel.share_heads(setup.config.num_heads), setup.max_len

    def pull(self, weights: Weights) -> None:
        slopes = torch.tensor(alibi_slopes(self.heads.size)[self.heads.start : self.heads.stop])
        distance = torch.arange(1 - self.longest, self.longest).abs()
        self.table = frozen((-slopes[:, None] * distance).to(weights.device))

    def forward(self) -> Tensor:
        return self.table


JinaBertModel, JinaBertForSequenceClassification, JinaBertForTokenClassification = encoder_classes(
    "JinaBert",
    jina_bert_trunk,
    partial(Head, dense=("bert.pooler.dense", "pooler.dense")),
    prefix=("bert",),
    heads=("cls", "classifier"),
)
