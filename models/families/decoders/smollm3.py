"""SmolLM3: Llama in which every few layers see no positions."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import LayerSpec
from models.families.decoders.llama import LlamaFields
from models.layers.rotary import Rope
from models.model import ModelSetup


class SmolLM3Fields(LlamaFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 2000000.0

    no_rope_layers: tuple[int, ...] | None = None
    """A number for each layer: 1 if it has rope, whatever the field's name says."""
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        layers = enumerate(super().layers(setup, rope))
        return tuple(layer if self.has_rope(index) else replace(layer, rope=None) for index, layer in layers)

    def has_rope(self, index: int) -> bool:
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def window(self, index: int) -> int | None:
        slides = self.use_sliding_window and self.slides(index, not self.has_rope(index))
        return self.sliding_window if slides else None


class SmolLM3ForCausalLM(DecoderForCausalLM):
    fields = SmolLM3Fields
