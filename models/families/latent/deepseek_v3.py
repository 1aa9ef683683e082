"""DeepSeek-V3, R1 and Kimi K2, GLM-4.7-Flash, and Youtu: latent attention, and V3's experts or none."""

from __future__ import annotations

from typing import Literal

from models.config import Eps, Size, family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM
from models.families.latent.fields import latent_spec, no_experts
from models.families.mixtures.glm4_moe import DeepSeekExperts
from models.model import ModelSetup


class DeepseekV3Fields(DeepSeekExperts, frozen=True, kw_only=True):
    n_shared_experts: int | None = 1
    n_group: Size | None = 8
    topk_group: Size | None = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int | None = 3
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"


class Glm4MoeLiteFields(DeepSeekExperts, frozen=True, kw_only=True):
    n_shared_experts: int | None = 1
    routed_scaling_factor: float = 1.8
    rms_norm_eps: Eps = 1e-5
    first_k_dense_replace: int | None = 1
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"


class DeepseekV3ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        fields = family_fields(setup.config, DeepseekV3Fields)
        super().__init__(setup, latent_spec(setup, fields, fields.experts))


class Glm4MoeLiteForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        fields = family_fields(setup.config, Glm4MoeLiteFields)
        super().__init__(setup, latent_spec(setup, fields, fields.experts))


class YoutuForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup, latent_spec(setup, family_fields(setup.config, DecoderFields), no_experts))
