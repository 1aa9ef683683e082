"""OLMoE: experts in every layer, and queries and keys that are normalised across heads."""

from __future__ import annotations

from dataclasses import replace

from models.config import ConfigError, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.layers.moe import ExpertSpec
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing


class OlmoeFields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    num_experts: Size = 64
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False
    clip_qkv: float | None = None

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if self.clip_qkv is not None:
            raise ConfigError(
                "config.json of this OLMoE clips queries, keys and values ('clip_qkv'), which no published "
                "one does: --model-impl transformers serves it"
            )
        return replace(super().spec(setup, rope), qk_norm="projection")

    def experts(self, index: int) -> ExpertSpec:
        routing = Routing(
            experts=self.num_experts, chosen=self.num_experts_per_tok, normalised=self.norm_topk_prob
        )
        return ExpertSpec(routing=routing, width=self.intermediate_size, activation=self.hidden_act)


class OlmoeForCausalLM(DecoderForCausalLM):
    fields = OlmoeFields
