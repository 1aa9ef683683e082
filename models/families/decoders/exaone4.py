"""EXAONE 4: norms after attention and MLP; where most layers have windows, the others see no positions."""

from __future__ import annotations

from dataclasses import replace

from models.config import Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import POST_NORMS, WITHOUT_BIASES, DecoderFields, LayerSpec
from models.layers.rotary import Rope
from models.model import ModelSetup


class Exaone4Fields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5
    sliding_window: Size | None = 4096
    sliding_window_pattern: int | str | None = 4
    """The number of layers of which the last has no window, or a letter for each of them, "L" for windows."""

    def window(self, index: int) -> int | None:
        pattern = self.sliding_window_pattern or 1
        if isinstance(pattern, str):
            is_near = pattern[index % len(pattern)] == "L"
        else:
            is_near = (index + 1) % pattern != 0
        return self.sliding_window if self.slides(index, is_near) else None

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        layers = super().layers(setup, rope)
        if self.sliding_window is None:
            return layers
        return tuple(layer if layer.window else replace(layer, rope=None) for layer in layers)


class Exaone4ForCausalLM(DecoderForCausalLM):
    fields = Exaone4Fields
    fixed = {"norms": POST_NORMS, "qk_norm": "head", **WITHOUT_BIASES}
