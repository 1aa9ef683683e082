"""Qwen2 and Qwen2.5: Llama with biased queries, keys and values, and windows in the upper layers."""

from __future__ import annotations

from models.config import ModelConfig, Size, family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, LayerSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup


class QwenFields(DecoderFields, frozen=True, kw_only=True):
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: int = 28
    """The number of lower layers that have no window."""

    def windows(self, config: ModelConfig) -> list[int | None]:
        """The window of each layer; None means that it has none."""
        if not self.use_sliding_window:
            return [None] * config.num_layers
        slides = [index >= self.max_window_layers for index in range(config.num_layers)]
        if self.layer_types is not None:
            slides = [kind == "sliding_attention" for kind in self.layer_types]
        return [self.sliding_window if slide else None for slide in slides]


class Qwen2ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, QwenFields)
        rope = read_rope(config.raw, config.head_dim, setup.max_len)
        layers = tuple(LayerSpec(rope=rope, window=window) for window in fields.windows(config))
        super().__init__(setup, fields.spec(config, layers, qkv_bias=True))
