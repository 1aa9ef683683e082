"""ERNIE 4.5 MoE: softmax scores with a correction, shared experts, rotation of neighbouring dimensions."""

from __future__ import annotations

from models.config import ConfigError, Size, family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, LayerSpec
from models.layers.moe import ExpertSpec, SharedExpert
from models.layers.rotary import read_rope
from models.model import ModelSetup
from models.ops.routing import Routing


class Ernie45MoeFields(DecoderFields, frozen=True, kw_only=True):
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

    def experts(self) -> ExpertSpec:
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
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, Ernie45MoeFields)
        if fields.use_bias:
            raise ConfigError(
                "config.json of this ERNIE has biases ('use_bias'), which no published one has: "
                "--model-impl transformers serves it"
            )
        rope = read_rope(config.raw, config.head_dim, setup.max_len, default_theta=500000.0)
        layers = tuple(
            LayerSpec(rope=rope, experts=fields.experts() if fields.has_experts(index) else None)
            for index in range(config.num_layers)
        )
        spec = fields.spec(
            config,
            layers,
            turns_neighbours=True,
        )
        super().__init__(setup, spec)
