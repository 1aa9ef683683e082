"""OLMo, OLMo 2 and OLMo 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from models.config import Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import POST_NORMS, DecoderFields, DecoderSpec, LayerSpec
from models.layers.rotary import Rope, plain_rope, read_rope
from models.model import ModelSetup


class OlmoFields(DecoderFields, frozen=True, kw_only=True):
    clip_qkv: float | None = None

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), qkv_limit=self.clip_qkv)


class OlmoForCausalLM(DecoderForCausalLM):
    fields = OlmoFields
    fixed = {"norm": "layer without weight", "eps": 1e-5}


class Olmo2Fields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2: norms after attention and MLP, and norms over all query or key heads at once."""

    fields = Olmo2Fields
    fixed = {"norms": POST_NORMS, "qk_norm": "projection"}


class Olmo3Fields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 500000.0

    rms_norm_eps: Eps = 1e-5
    sliding_window: Size | None = 4096
    rope_theta: float = 500000.0
    rope_parameters: dict[str, Any] | None = None

    def window(self, index: int) -> int | None:
        return self.sliding_window if self.slides(index, (index + 1) % 4 != 0) else None

    def rope(self, setup: ModelSetup) -> Rope:
        """The rope of layers without a window."""
        return self._rope_of(setup, "full_attention")

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        if self.rope_parameters and "sliding_attention" in self.rope_parameters:
            near = self._rope_of(setup, "sliding_attention")
        else:
            near = plain_rope(self.rope_theta, setup.config.head_dim)
        return tuple(
            replace(layer, rope=near) if layer.window else layer for layer in super().layers(setup, rope)
        )

    def _rope_of(self, setup: ModelSetup, layer_type: str) -> Rope:
        config, theta = setup.config, self.default_theta
        return read_rope(
            config.raw, config.head_dim, setup.max_len, layer_type=layer_type, default_theta=theta
        )


class Olmo3ForCausalLM(DecoderForCausalLM):
    """OLMo 3: OLMo 2 with windows in three layers of four, whose rotation is not stretched."""

    fields = Olmo3Fields
    fixed = {"norms": POST_NORMS, "qk_norm": "projection"}
