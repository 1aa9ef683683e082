"""GLM-4 and GLM-4-0414: rotation of neighbouring dimensions, half of each head's, and gate and up in one."""

from __future__ import annotations

from typing import ClassVar

from models.config import Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, Norms


class GlmFields(DecoderFields, frozen=True, kw_only=True):
    default_part: ClassVar[float] = 0.5

    rms_norm_eps: Eps = 1.5625e-07
    attention_bias: bool = True


class GlmForCausalLM(DecoderForCausalLM):
    fields = GlmFields
    fixed = {"turns_neighbours": True, "gate_up_in_one": True, "o_bias": False}


class Glm4ForCausalLM(GlmForCausalLM):
    fixed = {
        **GlmForCausalLM.fixed,
        "norms": Norms(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
    }
