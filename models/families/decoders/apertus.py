"""Apertus: Llama with normalised heads, and an MLP without a gate whose activation learns its two curves."""

from __future__ import annotations

from typing import ClassVar

from models.config import Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, Norms
from models.layers.rotary import Rope, read_rope
from models.model import ModelSetup

_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class ApertusFields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 12000000.0

    rms_norm_eps: Eps = 1e-5
    hidden_act: str = "xielu"

    def rope(self, setup: ModelSetup) -> Rope:
        raw, head_dim = setup.config.raw, setup.config.head_dim
        if not (raw.get("rope_scaling") or raw.get("rope_parameters")):
            raw = {**raw, "rope_scaling": _ROPE}
        return read_rope(raw, head_dim, setup.max_len, default_theta=self.default_theta)


class ApertusForCausalLM(DecoderForCausalLM):
    fields = ApertusFields
    fixed = {
        "is_gated": False,
        "qk_norm": "head",
        "norms": Norms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    }
