"""Cohere's Command-R and Aya: attention and MLP beside each other, behind one layer norm without bias."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import msgspec

from models.config import Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, Norms
from models.layers.rotary import Rope
from models.model import ModelSetup


class CohereFields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 500000.0

    rms_norm_eps: Eps = msgspec.field(name="layer_norm_eps", default=1e-5)
    logit_scale: float = 0.0625
    use_qk_norm: bool = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(
            super().spec(setup, rope),
            logit_scale=self.logit_scale,
            qk_norm="layer norm" if self.use_qk_norm else None,
        )


class Cohere2Fields(CohereFields, frozen=True, kw_only=True):
    """Cohere 2 has windows in most layers, of which the others see no positions."""

    default_theta: ClassVar[float] = 10000.0

    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = 4
    """The number of layers of which the last has no window."""

    def window(self, index: int) -> int | None:
        return (
            self.sliding_window
            if self.slides(index, (index + 1) % self.sliding_window_pattern != 0)
            else None
        )

    def sees_positions(self, index: int) -> bool:
        return self.window(index) is not None


class CohereForCausalLM(DecoderForCausalLM):
    fields = CohereFields
    fixed = {
        "norm": "layer",
        "norms": Norms(before_attention="input_layernorm"),
        "is_parallel": True,
        "turns_neighbours": True,
    }


class Cohere2ForCausalLM(CohereForCausalLM):
    fields = Cohere2Fields
