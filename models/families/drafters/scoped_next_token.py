"""The layer for multi-token prediction of Qwen3.5, Qwen3.6 and Qwen3-Next, which lies beside the model."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, family_fields
from models.families.decoders.decoder import make_norm
from models.families.decoders.decoder_spec import LayerSpec
from models.families.drafters.head import DraftHead, find_decoder
from models.layers.linear import Linear
from models.layers.norm import enter
from models.model import ModelSetup

_BESIDE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
"""The parts beside the layer."""


class ScopedNextToken(DraftHead):
    """A layer with attention, whatever others the model has, behind a projection of two normalised rows.

    What it passes on to the next guess is normalised, as the model's last hidden states are. Where there are
    several such layers, the first guesses all tokens.
    """

    method = "mtp"

    def __init__(self, setup: ModelSetup) -> None:
        config, size, target = setup.config, setup.config.hidden_size, find_decoder(setup, self.method)
        fields = family_fields(config, target.fields)
        rope = fields.rope(setup)
        super().__init__(setup, rope)
        self.scope = target.next_token_scope
        spec = dataclasses.replace(fields.spec(setup, rope), **target.fixed)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = make_norm(size, spec), make_norm(size, spec)
        self.fc = Linear(2 * size, size)
        layer = LayerSpec(rope=rope, experts=fields.experts(0))
        self.layer = target.layer_class(config, spec, layer, setup.parallel)
        self.norm = make_norm(size, spec)

    def pull(self, weights: Weights) -> None:
        """Read what lies in the scope alone: all else was read for the other model."""
        names, own = weights.reading.names, weights / self.scope
        starts = tuple(f"{(own / name).path}." for name in ("layers.0", *_BESIDE))
        read = [name for name in names if name.startswith(starts)]
        if names and not read:
            raise ConfigError(
                "--speculative-config: this checkpoint has no layers for multi-token prediction "
                f"('{own.path}'): use another method"
            )
        weights.ignore(*set(names).difference(read))
        for name in _BESIDE:
            load(getattr(self, name), own / name)
        load(self.layer, own / "layers.0")
        self.pull_rotary(weights)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor) -> Tensor:
        parts = [self.pre_fc_norm_embedding(self.embed(ids)), self.pre_fc_norm_hidden(stream)]
        delta, stream = self.layer(None, self.fc(torch.cat(parts, dim=-1)), self.rotations(positions))
        return enter(self.norm, delta, stream)[0]
