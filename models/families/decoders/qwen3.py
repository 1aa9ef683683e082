"""Qwen3: Qwen2 with normalised query and key heads instead of biases."""

from __future__ import annotations

from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.qwen2 import QwenFields


class Qwen3ForCausalLM(DecoderForCausalLM):
    fields = QwenFields
    fixed = {"qk_norm": "head"}
