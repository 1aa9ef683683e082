"""Phi, from Phi-1 to Phi-4."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from models.config import ConfigError, Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import WITHOUT_BIASES, DecoderFields, DecoderSpec, Norms
from models.families.decoders.gpt import ALL_BIASES, LAYER_NORMS
from models.layers.rotary import Rope
from models.model import ModelSetup


class PhiFields(DecoderFields, frozen=True, kw_only=True):
    default_part: ClassVar[float] = 0.5

    rms_norm_eps: Eps = msgspec.field(name="layer_norm_eps", default=1e-5)
    hidden_act: str = "gelu_new"
    qk_layernorm: bool = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if self.qk_layernorm:
            raise ConfigError(
                "config.json of this Phi normalises queries and keys ('qk_layernorm'), which no published "
                "one does: --model-impl transformers serves it"
            )
        return super().spec(setup, rope)


class PhiForCausalLM(DecoderForCausalLM):
    """Phi-1, 1.5 and 2: attention and MLP beside each other behind one norm, and biases everywhere."""

    fields = PhiFields
    fixed = {
        **LAYER_NORMS,
        **ALL_BIASES,
        "norms": Norms(before_attention="input_layernorm"),
        "is_parallel": True,
        "head_bias": True,
    }
    saved_names = {"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "norm": "final_layernorm"}


class Phi3Fields(DecoderFields, frozen=True, kw_only=True):
    def window(self, index: int) -> int | None:
        return self.sliding_window


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3, Phi-3.5, Phi-4: Llama with fused matrices, longrope, and heads rotated in part."""

    fields = Phi3Fields
    fixed = {"qkv": "in one", "gate_up_in_one": True, **WITHOUT_BIASES}
