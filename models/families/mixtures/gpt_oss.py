"""gpt-oss: sinks in attention, biases everywhere, clamped gates, windows in every second layer."""

from __future__ import annotations

from models.config import ConfigError, Size, family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, LayerSpec
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup
from models.ops.routing import Routing

_SAVED = SavedExperts(in_one=True, transposed=True, interleaved=True)


class GptOssFields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: Size | None = 128
    num_local_experts: Size = 128
    num_experts_per_tok: Size = 4
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def slides(self, index: int) -> bool:
        if self.layer_types is not None:
            return self.layer_types[index] == "sliding_attention"
        return index % 2 == 0

    def experts(self) -> ExpertSpec:
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
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, GptOssFields)
        rope = read_rope(config.raw, config.head_dim, setup.max_len, default_theta=150000.0)
        layers = tuple(
            LayerSpec(
                rope=rope,
                window=fields.sliding_window if fields.slides(index) else None,
                experts=fields.experts(),
            )
            for index in range(config.num_layers)
        )
        spec = fields.spec(
            config,
            layers,
            sinks=True,
            qkv_bias=fields.attention_bias,
            o_bias=fields.attention_bias,
        )
        super().__init__(setup, spec)
