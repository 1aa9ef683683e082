"""gpt-oss: sinks in attention, biases everywhere, clamped gates, windows in every second layer."""

from __future__ import annotations

from typing import ClassVar

from models.config import ConfigError, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec
from models.ops.expert_routing_ops import Routing

_SAVED = SavedExperts(in_one=True, transposed=True, interleaved=True)


class GptOssFields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 150000.0

    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: Size | None = 128
    num_local_experts: Size = 128
    num_experts_per_tok: Size = 4
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def window(self, index: int) -> int | None:
        return self.sliding_window if self.slides(index, index % 2 == 0) else None

    def experts(self, index: int) -> ExpertSpec:
        if (self.swiglu_limit, self.swiglu_alpha) != (7.0, 1.702):
            raise ConfigError(
                f"config.json of this gpt-oss has 'swiglu_limit' {self.swiglu_limit} and 'swiglu_alpha' "
                f"{self.swiglu_alpha}: only 7.0 and 1.702 are computed, which all published ones have"
            )
        return ExpertSpec(
            routing=Routing(experts=self.num_local_experts, chosen=self.num_experts_per_tok),
            width=self.intermediate_size,
            activation="clamped",
            router="router",
            router_bias=True,
            saved=_SAVED,
            biased=True,
        )


class GptOssForCausalLM(DecoderForCausalLM):
    fields = GptOssFields
    fixed = {"sinks": True}
