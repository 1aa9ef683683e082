"""Qwen2 and Qwen3."""

from __future__ import annotations

from models.config import Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields


class QwenFields(DecoderFields, frozen=True, kw_only=True):
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: int = 28
    """The number of lower layers that have no window."""

    def window(self, index: int) -> int | None:
        slides = self.use_sliding_window and self.slides(index, index >= self.max_window_layers)
        return self.sliding_window if slides else None


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2 and Qwen2.5: Llama with biased queries, keys and values, and windows in the upper layers."""

    fields = QwenFields
    fixed = {"qkv_bias": True, "o_bias": False}


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Qwen3: Qwen2 with normalised query and key heads instead of biases."""

    fields = QwenFields
    fixed = {"qk_norm": "head"}
