"""MiniCPM 3: latent attention without experts, and multipliers of embeddings, sublayers and logits."""

from __future__ import annotations

import math
from dataclasses import replace

from models.config import Eps, Size
from models.families.decoders.decoder_spec import DecoderSpec
from models.families.decoders.llama import LlamaFields
from models.families.latent.latent_decoder import LatentForCausalLM
from models.layers.rotary import Rope
from models.model import ModelSetup


class MiniCPM3Fields(LlamaFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5
    scale_emb: float = 12.0
    scale_depth: float | None = 1.4
    """A factor of all that sublayers add, which is divided by the root of the number of layers."""
    dim_model_base: Size | None = 256
    """The hidden size for which the size of logits was chosen."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        config, depth, base = setup.config, self.scale_depth, self.dim_model_base
        return replace(
            super().spec(setup, rope),
            embedding_scale=self.scale_emb,
            residual_scale=1.0 if depth is None else depth / math.sqrt(config.num_layers),
            logit_scale=1.0 if base is None else base / config.hidden_size,
        )


class MiniCPM3ForCausalLM(LatentForCausalLM):
    fields = MiniCPM3Fields
    turns_neighbours = False
