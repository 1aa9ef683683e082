"""ERNIE 4.5 MoE: softmax scores with a correction, shared experts, rotation of neighbouring dimensions."""

from __future__ import annotations

from typing import ClassVar

from models.config import ConfigError, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import WITHOUT_BIASES, DecoderFields, DecoderSpec
from models.layers.moe import ExpertSpec, SharedExpert
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing


class Ernie45MoeFields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 500000.0

    rms_norm_eps: float = 1e-5
    use_bias: bool = False
    moe_intermediate_size: Size = 1536
    moe_k: Size = 6
    moe_num_experts: Size = 64
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    """The last layer that may have experts; -1 means that of the model."""
    moe_layer_interval: Size = 1
    moe_norm_min: float = 1e-12

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if self.use_bias:
            raise ConfigError(
                "config.json of this ERNIE has biases ('use_bias'), which no published one has: "
                "--model-impl transformers serves it"
            )
        return super().spec(setup, rope)

    def experts(self, index: int) -> ExpertSpec | None:
        if not self.has_experts(index):
            return None
        width, shared = self.moe_intermediate_size, None
        if self.moe_num_shared_experts:
            shared = SharedExpert("shared_experts", self.moe_num_shared_experts * width)
        return ExpertSpec(
            routing=Routing(experts=self.moe_num_experts, chosen=self.moe_k, least_sum=self.moe_norm_min),
            width=width,
            activation=self.hidden_act,
            correction="moe_statics.e_score_correction_bias",
            shared=shared,
        )

    def has_experts(self, index: int) -> bool:
        ended = 0 <= self.moe_layer_end_index < index
        return (
            index >= self.moe_layer_start_index and not ended and (index + 1) % self.moe_layer_interval == 0
        )


class Ernie45MoeForCausalLM(DecoderForCausalLM):
    fields = Ernie45MoeFields
    fixed = {"turns_neighbours": True, **WITHOUT_BIASES}
