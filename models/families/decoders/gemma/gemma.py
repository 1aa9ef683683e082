"""Gemma, Gemma 2 and Gemma 3 (text): norms of 1 + w, scaled embeddings, soft-caps, alternating windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from models.config import Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import SANDWICH_NORMS, DecoderFields, DecoderSpec, LayerSpec
from models.layers.rotary import Rope, plain_rope, read_rope
from models.model import ModelSetup


class GemmaFields(DecoderFields, frozen=True, kw_only=True):
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None
    query_pre_attn_scalar: float | None = None
    """The number by whose root attention is scaled; None means the width of the heads."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    @property
    def activation(self) -> str:
        """The activation's name. The first checkpoints say "gelu" and mean its approximation."""
        named = self.hidden_activation or self.hidden_act
        return "gelu_pytorch_tanh" if named == "gelu" else named

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(
            super().spec(setup, rope),
            activation=self.activation,
            attention_scale=(self.query_pre_attn_scalar or setup.config.head_dim) ** -0.5,
            norm_offset=1.0,
            embedding_scale=setup.config.hidden_size**0.5,
            attention_softcap=self.attn_logit_softcapping,
            logit_softcap=self.final_logit_softcapping,
        )


class Gemma2Fields(GemmaFields, frozen=True, kw_only=True):
    query_pre_attn_scalar: float | None = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    sliding_window: Size | None = 4096
    sliding_window_pattern: int = 2
    """The number of layers of which one, the last, has no window."""

    def is_near(self, index: int) -> bool:
        """Whether a layer has a window, or would have one if config.json said how wide."""
        return self.slides(index, (index + 1) % self.sliding_window_pattern != 0)

    def window(self, index: int) -> int | None:
        return self.sliding_window if self.is_near(index) else None


class Gemma3Fields(Gemma2Fields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 1000000.0

    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window_pattern: int = 6
    rope_local_base_freq: float = 10000.0
    rope_parameters: dict[str, Any] | None = None

    def rope(self, setup: ModelSetup) -> Rope:
        """The rope of layers without a window."""
        config, theta = setup.config, self.default_theta
        return read_rope(
            config.raw, config.head_dim, setup.max_len, layer_type="full_attention", default_theta=theta
        )

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        raw, dim = setup.config.raw, setup.config.head_dim
        if self.rope_parameters and "sliding_attention" in self.rope_parameters:
            near = read_rope(raw, dim, setup.max_len, layer_type="sliding_attention")
        else:
            near = plain_rope(self.rope_local_base_freq, dim)  # it is never stretched
        layers = enumerate(super().layers(setup, rope))
        return tuple(replace(layer, rope=near) if self.is_near(index) else layer for index, layer in layers)


class GemmaForCausalLM(DecoderForCausalLM):
    fields = GemmaFields


class Gemma2ForCausalLM(DecoderForCausalLM):
    fields = Gemma2Fields
    fixed = {"norms": SANDWICH_NORMS}


class Gemma3ForCausalLM(DecoderForCausalLM):
    fields = Gemma3Fields
    fixed = {"norms": SANDWICH_NORMS, "qk_norm": "head"}
