"""Llama, and families that are Llama with a switch or two: Mistral, Qwen, GLM, Granite and their kin."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import msgspec

from models.config import Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import (
    POST_NORMS,
    PRE_NORMS,
    WITHOUT_BIASES,
    DecoderFields,
    DecoderSpec,
    Norms,
)
from models.layers.attention import QueryGrowth
from models.layers.rotary import Rope, read_rope
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
    rms_norm_eps: Eps = 1e-5
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

    def sees_positions(self, index: int) -> bool:
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def window(self, index: int) -> int | None:
        slides = self.use_sliding_window and self.slides(index, not self.sees_positions(index))
        return self.sliding_window if slides else None


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """SmolLM3: Llama in which every few layers see no positions."""

    fields = SmolLM3Fields


_APERTUS_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class ApertusFields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 12000000.0

    rms_norm_eps: Eps = 1e-5
    hidden_act: str = "xielu"

    def rope(self, setup: ModelSetup) -> Rope:
        raw, head_dim = setup.config.raw, setup.config.head_dim
        if not (raw.get("rope_scaling") or raw.get("rope_parameters")):
            raw = {**raw, "rope_scaling": _APERTUS_ROPE}
        return read_rope(raw, head_dim, setup.max_len, default_theta=self.default_theta)


class ApertusForCausalLM(DecoderForCausalLM):
    """Apertus: Llama with normalised heads, and MLPs without gates whose activation learns its two curves."""

    fields = ApertusFields
    fixed = {
        "is_gated": False,
        "qk_norm": "head",
        "norms": Norms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm"),
    }


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

    def sees_positions(self, index: int) -> bool:
        return self.sliding_window is None or self.window(index) is not None


class Exaone4ForCausalLM(DecoderForCausalLM):
    """EXAONE 4: norms after attention and MLP; where most layers have windows, others see no positions."""

    fields = Exaone4Fields
    fixed = {"norms": POST_NORMS, "qk_norm": "head", **WITHOUT_BIASES}


class GlmFields(DecoderFields, frozen=True, kw_only=True):
    default_part: ClassVar[float] = 0.5

    rms_norm_eps: Eps = 1.5625e-07
    attention_bias: bool = True


class GlmForCausalLM(DecoderForCausalLM):
    """GLM-4: rotation of neighbouring dimensions, half of each head's, and gate and up in one."""

    fields = GlmFields
    fixed = {"turns_neighbours": True, "gate_up_in_one": True, "o_bias": False}


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: GLM-4 with norms after attention and MLP, too."""

    fixed = {
        **GlmForCausalLM.fixed,
        "norms": Norms(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
    }


class GraniteFields(LlamaFields, frozen=True, kw_only=True):
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(
            super().spec(setup, rope),
            attention_scale=self.attention_multiplier,
            embedding_scale=self.embedding_multiplier,
            residual_scale=self.residual_multiplier,
            logit_scale=1.0 / self.logits_scaling,
        )


class GraniteForCausalLM(DecoderForCausalLM):
    """Granite 3: Llama with multipliers of embeddings, attention, residuals and logits."""

    fields = GraniteFields


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


class StableLmFields(DecoderFields, frozen=True, kw_only=True):
    default_part: ClassVar[float] = 0.25

    rms_norm_eps: Eps = msgspec.field(name="layer_norm_eps", default=1e-5)
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    """Whether attention and MLP read the same, behind one norm."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        is_parallel = self.use_parallel_residual
        return replace(
            super().spec(setup, rope),
            norms=Norms(before_attention="input_layernorm") if is_parallel else PRE_NORMS,
            is_parallel=is_parallel,
            qk_norm="layer norm" if self.qk_layernorm else None,
            qkv_bias=self.use_qkv_bias,
        )


class StableLmForCausalLM(DecoderForCausalLM):
    """StableLM: Llama with layer norms, rotation of a part of each head, and in some models more."""

    fields = StableLmFields
    fixed = {"norm": "layer", "norm_bias": True, "o_bias": False}
    saved_names = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}


class Phi3Fields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5

    def window(self, index: int) -> int | None:
        return self.sliding_window


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3, Phi-3.5, Phi-4: Llama with fused matrices, longrope, and heads rotated in part."""

    fields = Phi3Fields
    fixed = {"qkv": "in one", "gate_up_in_one": True, **WITHOUT_BIASES}
