"""EAGLE: one layer behind a projection of a token and the last hidden state before it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, family_fields
from models.families.decoders.decoder import DecoderLayer
from models.families.decoders.decoder_spec import Norms
from models.families.decoders.llama import LlamaFields
from models.families.drafters.head import DraftHead
from models.layers.linear import Linear
from models.model import ModelSetup


class Eagle(DraftHead):
    method = "eagle"

    def __init__(self, setup: ModelSetup) -> None:
        config, fields = setup.config, family_fields(setup.config, LlamaFields)
        rope, size = fields.rope(setup), config.hidden_size
        super().__init__(setup, rope)
        own = self.embedding_width
        if config.num_layers != 1 or size != own:
            raise ConfigError(
                f"this EAGLE has {config.num_layers} layers, {size} wide, and must have one, as wide as the "
                f"embeddings of the model that it guesses for, which have {own} numbers"
            )
        norms = Norms(before_mlp="post_attention_layernorm")
        spec = replace(fields.spec(setup, rope), norms=norms)
        self.fc = Linear(2 * size, size)
        self.layer = DecoderLayer(config, spec, spec.layers[0], setup.parallel)

    def pull(self, weights: Weights) -> None:
        trunk = weights.first("model", "")
        trunk.ignore("embed_tokens")  # the other model's
        weights.ignore("lm_head")
        self.fc.has_bias = "bias" in trunk / "fc"
        load(self.fc, trunk / "fc")
        load(self.layer, trunk / "layers.0")
        self.pull_rotary(weights)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor) -> Tensor:
        x = self.fc(torch.cat([self.embed(ids), stream], dim=-1))
        delta, stream = self.layer(None, x, self.rotations(positions))
        return ops.add(stream, delta)
