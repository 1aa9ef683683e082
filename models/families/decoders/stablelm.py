"""StableLM: Llama with layer norms, rotation of a part of each head, and in some models more."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import msgspec

from models.config import Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import PRE_NORMS, DecoderFields, DecoderSpec, Norms
from models.layers.rotary import Rope
from models.model import ModelSetup


class StableLmFields(DecoderFields, frozen=True, kw_only=True):
    default_part: ClassVar[float] = 0.25

    rms_norm_eps: Eps = msgspec.field(name="layer_norm_eps", default=1e-5)
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    """Whether attention and MLP read the same, behind one norm."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        is_parallel = self.use_parallel_residual
        return replace(
            super().spec(setup, rope),
            norms=Norms(before_attention="input_layernorm") if is_parallel else PRE_NORMS,
            is_parallel=is_parallel,
            qk_norm="layer norm" if self.qk_layernorm else None,
            qkv_bias=self.use_qkv_bias,
        )


class StableLmForCausalLM(DecoderForCausalLM):
    fields = StableLmFields
    fixed = {"norm": "layer", "norm_bias": True, "o_bias": False}
    saved_names = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}
