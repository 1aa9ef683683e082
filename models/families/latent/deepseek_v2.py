"""DeepSeek-V2 and V2-Lite: latent attention, and experts by softmax scores, of the best groups or of all.

The text of DeepSeek-OCR has the same experts, and plain attention.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from models.config import ConfigError
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderSpec
from models.families.latent.latent_decoder import LatentForCausalLM
from models.families.mixtures import DeepSeekExperts
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing


class DeepseekV2Fields(DeepSeekExperts, frozen=True, kw_only=True):
    correction: ClassVar[str] = ""

    n_shared_experts: int | None = 2
    norm_topk_prob: bool | None = False
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if self.norm_topk_prob:
            raise ConfigError(
                "config.json of this DeepSeek-V2 divides the weights of experts by their sum "
                "('norm_topk_prob'), which no published one does and implementations differ in: if it was "
                """trained without, say --hf-overrides '{"norm_topk_prob": false}'"""
            )
        return super().spec(setup, rope)

    def routing(self) -> Routing:
        grouped = self.topk_method == "group_limited_greedy"
        return Routing(
            experts=self.n_routed_experts,
            chosen=self.num_experts_per_tok,
            normalised=False,
            factor=self.routed_scaling_factor,
            groups=(self.n_group or 1) if grouped else 1,
            kept_groups=(self.topk_group or 1) if grouped else 1,
            summed_best=1,
        )


class DeepseekV2ForCausalLM(LatentForCausalLM):
    fields = DeepseekV2Fields
    turns_neighbours = True


class DeepseekV2WithHeadsForCausalLM(DecoderForCausalLM):
    fields = DeepseekV2Fields
