"""Llama, and families that are Llama with a switch or two: Mistral, Arcee, SmolLM3 and their kin."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import msgspec

from models.config import Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec, Norms
from models.layers.attention import QueryGrowth
from models.layers.rotary import Rope
from models.model import ModelSetup


class LlamaFields(DecoderFields, frozen=True, kw_only=True):
    mlp_bias: bool = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), mlp_bias=self.mlp_bias)


class LlamaForCausalLM(DecoderForCausalLM):
    fields = LlamaFields


class MistralFields(LlamaFields, frozen=True, kw_only=True):
    sliding_window: Size | None = 4096
    """The window of all layers; later checkpoints say null."""

    def window(self, index: int) -> int | None:
        return self.sliding_window


class MistralForCausalLM(DecoderForCausalLM):
    fields = MistralFields


class GrowthFields(msgspec.Struct, frozen=True):
    """The rope parameters that say how queries grow."""

    llama_4_scaling_beta: float = 0.0
    original_max_position_embeddings: Size | None = None

    def growth(self, longest: int) -> QueryGrowth | None:
        """How queries grow in texts of up to `longest` tokens; None if they do not."""
        length = self.original_max_position_embeddings
        if not self.llama_4_scaling_beta or length is None or longest <= length:
            return None
        return QueryGrowth(self.llama_4_scaling_beta, length)


class Ministral3Fields(MistralFields, frozen=True, kw_only=True):
    sliding_window: Size | None = None
    rope_parameters: GrowthFields

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), query_growth=self.rope_parameters.growth(setup.max_len))


class Ministral3ForCausalLM(DecoderForCausalLM):
    fields = Ministral3Fields


class ArceeFields(LlamaFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5
    hidden_act: str = "relu2"


class ArceeForCausalLM(DecoderForCausalLM):
    """Arcee (AFM): Llama whose MLP has no gate and squares what is positive."""

    fields = ArceeFields
    fixed = {"is_gated": False}


class Ernie45Fields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 500000.0

    rms_norm_eps: Eps = 1e-5
    use_bias: bool | None = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        bias = bool(self.use_bias)
        return replace(super().spec(setup, rope), qkv_bias=bias, o_bias=bias, mlp_bias=bias)


class Ernie45ForCausalLM(DecoderForCausalLM):
    """ERNIE 4.5 without experts: Llama with rotation of neighbouring dimensions."""

    fields = Ernie45Fields
    fixed = {"turns_neighbours": True}


class HeliumFields(LlamaFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 100000.0

    rms_norm_eps: Eps = 1e-8


class HeliumForCausalLM(DecoderForCausalLM):
    """Helium: Llama with rotation of neighbouring dimensions."""

    fields = HeliumFields
    fixed = {"turns_neighbours": True, "o_bias": False}


class HunYuanFields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """HunYuan without experts: Llama whose query and key heads are normalised after their rotation."""

    fields = HunYuanFields
    fixed = {"qk_norm": "rotated head"}
    saved_names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


class InternLM2Fields(DecoderFields, frozen=True, kw_only=True):
    bias: bool = False
    """Whether the four projections of attention have biases."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), qkv_bias=self.bias, o_bias=self.bias)


class InternLM2ForCausalLM(DecoderForCausalLM):
    """InternLM2: Llama under other names, with queries, keys and values in one matrix by key head."""

    fields = InternLM2Fields
    fixed = {"qkv": "by head", "norms": Norms(before_attention="attention_norm", before_mlp="ffn_norm")}
    saved_names = {
        "embed_tokens": "tok_embeddings",
        "self_attn": "attention",
        "qkv_proj": "wqkv",
        "o_proj": "wo",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "lm_head": "output",
    }


class SeedOssFields(LlamaFields, frozen=True, kw_only=True):
    attention_bias: bool = True
    attention_out_bias: bool = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), o_bias=self.attention_out_bias)


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS: Llama with biased queries, keys and values."""

    fields = SeedOssFields


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
    """SmolLM3: Llama in which every few layers see no positions."""

    fields = SmolLM3Fields
