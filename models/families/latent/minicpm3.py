"""MiniCPM 3: latent attention without experts, and multipliers of embeddings, sublayers and logits."""

from __future__ import annotations

import math

from models.config import Eps, Size, family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM
from models.families.latent.fields import latent_spec, no_experts
from models.model import ModelSetup


class MiniCPM3Fields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5
    scale_emb: float = 12.0
    scale_depth: float | None = 1.4
    """A factor of all that sublayers add, which is divided by the root of the number of layers."""
    dim_model_base: Size | None = 256
    """The hidden size for which the size of logits was chosen."""


class MiniCPM3ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, MiniCPM3Fields)
        depth, base = fields.scale_depth, fields.dim_model_base
        spec = latent_spec(
            setup,
            fields,
            no_experts,
            turns_neighbours=False,
            mlp_bias=fields.mlp_bias,
            embedding_scale=fields.scale_emb,
            residual_scale=1.0 if depth is None else depth / math.sqrt(config.num_layers),
            logit_scale=1.0 if base is None else base / config.hidden_size,
        )
        super().__init__(setup, spec)
