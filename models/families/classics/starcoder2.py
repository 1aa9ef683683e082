"""StarCoder 2: layer norms, MLPs without gates, and biases everywhere, with rotation and windows."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from models.config import Eps
from models.families.classics.gpt2 import LAYER_NORMS
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.layers.rotary import Rope
from models.model import ModelSetup


class Starcoder2Fields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = msgspec.field(name="norm_epsilon", default=1e-5)
    hidden_act: str = "gelu_pytorch_tanh"
    use_bias: bool = True

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        bias = self.use_bias
        return replace(super().spec(setup, rope), qkv_bias=bias, o_bias=bias, mlp_bias=bias)

    def window(self, index: int) -> int | None:
        return self.sliding_window


class Starcoder2ForCausalLM(DecoderForCausalLM):
    fields = Starcoder2Fields
    fixed = LAYER_NORMS
    saved_names = {"up_proj": "c_fc", "down_proj": "c_proj"}
