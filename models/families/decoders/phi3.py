"""Phi-3, Phi-3.5, Phi-4: Llama with fused matrices in the checkpoint, longrope, and heads rotated in part."""

from __future__ import annotations

from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import WITHOUT_BIASES, DecoderFields


class Phi3Fields(DecoderFields, frozen=True, kw_only=True):
    def window(self, index: int) -> int | None:
        return self.sliding_window


class Phi3ForCausalLM(DecoderForCausalLM):
    fields = Phi3Fields
    fixed = {"qkv": "in one", "gate_up_in_one": True, **WITHOUT_BIASES}
