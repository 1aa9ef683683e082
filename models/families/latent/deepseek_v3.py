"""DeepSeek-V3, R1 and Kimi K2, GLM-4.7-Flash, and Youtu: latent attention, and V3's experts or none."""

from __future__ import annotations

from typing import Literal

from models.config import Eps, Size
from models.families.latent.latent_decoder import LatentForCausalLM
from models.families.mixtures import DeepSeekExperts


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


class DeepseekV3ForCausalLM(LatentForCausalLM):
    fields = DeepseekV3Fields


class Glm4MoeLiteForCausalLM(LatentForCausalLM):
    fields = Glm4MoeLiteFields


class YoutuForCausalLM(LatentForCausalLM):
    """The same decoder without experts."""
