"""Layers for multi-token prediction (MTP), behind the last layer of a model or beside it (Qwen3.5)."""

from __future__ import annotations

import dataclasses

import msgspec
import torch
from torch import Tensor

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, family_fields
from models.families.decoders.decoder import make_norm
from models.families.decoders.decoder_spec import LayerSpec
from models.families.drafters.head import DraftHead, find_decoder
from models.layers.linear import Linear
from models.layers.norm import RMSNorm, enter
from models.model import ModelSetup


class NextToken(DraftHead):
    """DeepSeek's and GLM's: a whole layer behind a projection of a token and the hidden state before it.

    Where there are several such layers, the first guesses all tokens, one after the other.
    """

    method = "mtp"

    def __init__(self, setup: ModelSetup) -> None:
        config, size = setup.config, setup.config.hidden_size
        count = config.raw.get("num_nextn_predict_layers")
        if not isinstance(count, int) or count < 1:
            raise ConfigError(
                f"--speculative-config: this {config.architecture} has no layers for multi-token prediction "
                "('num_nextn_predict_layers'): use another method"
            )
        self.number, target = config.num_layers, find_decoder(setup, self.method)
        longer = msgspec.structs.replace(config, num_layers=self.number + 1)
        spec = dataclasses.replace(target.spec(dataclasses.replace(setup, config=longer)), **target.fixed)
        layer = spec.layers[self.number]
        if spec.latent is not None and spec.latent.indexer is not None:
            raise ConfigError(
                f"--speculative-config: mtp does not work with the indexer of {config.architecture} yet: use "
                "another method"
            )
        super().__init__(setup, layer.rope)
        self.enorm, self.hnorm = RMSNorm(size, spec.eps), RMSNorm(size, spec.eps)
        self.eh_proj = Linear(2 * size, size)
        self.layer = target.layer_class(config, spec, layer, setup.parallel)
        self.norm = RMSNorm(size, spec.eps)

    def pull(self, weights: Weights) -> None:
        """Read the layer alone: all else was read for the other model, with which it is shared."""
        own = weights.first(*self.target.trunks) / "layers" / str(self.number)
        weights.ignore(*(name for name in weights.reading.names if not name.startswith(f"{own.path}.")))
        own.ignore("embed_tokens", "shared_head.head")
        for name, module in (("enorm", self.enorm), ("hnorm", self.hnorm), ("eh_proj", self.eh_proj)):
            load(module, own / name)
        load(self.layer, own)
        load(self.norm, own / "shared_head" / "norm")
        self.pull_rotary(weights)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor) -> Tensor:
        rows = self.embed(ids).masked_fill((positions == 0)[:, None], 0)  # as they were in training
        x = self.eh_proj(torch.cat([self.enorm(rows), self.hnorm(stream)], dim=-1))
        delta, stream = self.layer(None, x, self.rotations(positions))
        return ops.add(stream, delta)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.norm(hidden))


_BESIDE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
"""The parts beside the layer."""


class ScopedNextToken(DraftHead):
    """The layer of Qwen3.5, Qwen3.6 and Qwen3-Next: attention behind a projection of two normalised rows.

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
