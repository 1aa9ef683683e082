"""ERNIE 4.5 without experts: Llama with rotation of neighbouring dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from models.config import Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.layers.rotary import Rope
from models.model import ModelSetup


class Ernie45Fields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 500000.0

    rms_norm_eps: Eps = 1e-5
    use_bias: bool | None = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        bias = bool(self.use_bias)
        return replace(super().spec(setup, rope), qkv_bias=bias, o_bias=bias, mlp_bias=bias)


class Ernie45ForCausalLM(DecoderForCausalLM):
    fields = Ernie45Fields
    fixed = {"turns_neighbours": True}
