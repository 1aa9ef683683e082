"""Decoders whose layers have experts in place of MLPs: Mixtral, Qwen, gpt-oss, GLM-4.5 and their kin."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from models.config import ConfigError, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import WITHOUT_BIASES, DecoderFields, DecoderSpec
from models.families.decoders.llama import GraniteFields, QwenFields
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec, SharedExpert
from models.layers.rotary import Rope, read_rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing


class MixtralFields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 1000000.0
    scores: ClassVar[Literal["softmax", "sigmoid"]] = "softmax"
    correction: ClassVar[str] = ""

    rms_norm_eps: float = 1e-5
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2

    def window(self, index: int) -> int | None:
        return self.sliding_window

    def experts(self, index: int) -> ExpertSpec:
        routing = Routing(experts=self.num_local_experts, chosen=self.num_experts_per_tok, scores=self.scores)
        return ExpertSpec(
            routing=routing,
            width=self.intermediate_size,
            activation=self.hidden_act,
            scope="block_sparse_moe",
            correction=self.correction,
            saved=SavedExperts(gate="w1", up="w3", down="w2"),
        )


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral: Mistral with experts in every layer."""

    fields = MixtralFields
    fixed = WITHOUT_BIASES


class MiniMaxM2Fields(MixtralFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 5000000.0
    scores: ClassVar[Literal["softmax", "sigmoid"]] = "sigmoid"
    correction: ClassVar[str] = "e_score_correction_bias"

    rms_norm_eps: float = 1e-6
    rotary_dim: Size | None = None
    """The dimensions of a head that are rotated, in the first checkpoints."""

    def rope(self, setup: ModelSetup) -> Rope:
        raw, head_dim = setup.config.raw, setup.config.head_dim
        if self.rotary_dim is not None:
            raw = raw | {"partial_rotary_factor": self.rotary_dim / head_dim}
        return read_rope(raw, head_dim, setup.max_len, default_theta=self.default_theta)

    def window(self, index: int) -> int | None:
        return None


class MiniMaxM2ForCausalLM(DecoderForCausalLM):
    """MiniMax-M2: sigmoid scores with a correction, queries and keys normalised across heads."""

    fields = MiniMaxM2Fields
    fixed = {"qk_norm": "projection", **WITHOUT_BIASES}


class OlmoeFields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    num_experts: Size = 64
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False
    clip_qkv: float | None = None

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if self.clip_qkv is not None:
            raise ConfigError(
                "config.json of this OLMoE clips queries, keys and values ('clip_qkv'), which no published "
                "one does: --model-impl transformers serves it"
            )
        return replace(super().spec(setup, rope), qk_norm="projection")

    def experts(self, index: int) -> ExpertSpec:
        routing = Routing(
            experts=self.num_experts, chosen=self.num_experts_per_tok, normalised=self.norm_topk_prob
        )
        return ExpertSpec(routing=routing, width=self.intermediate_size, activation=self.hidden_act)


class OlmoeForCausalLM(DecoderForCausalLM):
    """OLMoE: experts in every layer, and queries and keys that are normalised across heads."""

    fields = OlmoeFields


_GPT_OSS_SAVED = SavedExperts(in_one=True, transposed=True, interleaved=True)


class GptOssFields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 150000.0

    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: Size | None = 128
    num_local_experts: Size = 128
    num_experts_per_tok: Size = 4
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def window(self, index: int) -> int | None:
        return self.sliding_window if self.slides(index, index % 2 == 0) else None

    def experts(self, index: int) -> ExpertSpec:
        if (self.swiglu_limit, self.swiglu_alpha) != (7.0, 1.702):
            raise ConfigError(
                f"config.json of this gpt-oss has 'swiglu_limit' {self.swiglu_limit} and 'swiglu_alpha' "
                f"{self.swiglu_alpha}: only 7.0 and 1.702 are computed, which all published ones have"
            )
        return ExpertSpec(
            routing=Routing(experts=self.num_local_experts, chosen=self.num_experts_per_tok),
            width=self.intermediate_size,
            activation="clamped",
            router="router",
            router_bias=True,
            saved=_GPT_OSS_SAVED,
            biased=True,
        )


class GptOssForCausalLM(DecoderForCausalLM):
    """gpt-oss: sinks in attention, biases everywhere, clamped gates, windows in every second layer."""

    fields = GptOssFields
    fixed = {"sinks": True}


_GRANITE_SAVED = SavedExperts(all_gate_up="input_linear.weight", all_down="output_linear.weight", in_one=True)


class GraniteMoeFields(GraniteFields, frozen=True, kw_only=True):
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2
    shared_intermediate_size: int = 0
    """The width of the expert that all tokens share; 0 means that there is none."""

    def experts(self, index: int) -> ExpertSpec | None:
        shared = None
        if self.shared_intermediate_size > 0:
            names = ("input_linear", "output_linear")
            shared = SharedExpert("shared_mlp", self.shared_intermediate_size, beside=True, fused=names)
        return ExpertSpec(
            routing=Routing(experts=self.num_local_experts, chosen=self.num_experts_per_tok),
            width=self.intermediate_size,
            activation=self.hidden_act,
            scope="block_sparse_moe",
            router="router.layer",
            saved=_GRANITE_SAVED,
            shared=shared,
        )


class GraniteMoeForCausalLM(DecoderForCausalLM):
    """Granite 3 MoE: Granite with experts in every layer, and in some models a shared one."""

    fields = GraniteMoeFields


class QwenMoeFields(QwenFields, frozen=True, kw_only=True):
    saved: ClassVar[SavedExperts] = SavedExperts()

    sliding_window: int | None = 4096
    """The window, where there is one; transformers writes 0 where there is none."""
    num_experts: int = 60
    num_local_experts: int | None = None
    """The name that transformers 5 writes for the number of experts."""
    num_experts_per_tok: Size = 4
    moe_intermediate_size: Size = 1408
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    """The distance of layers with experts from each other."""
    mlp_only_layers: tuple[int, ...] | None = None

    def experts(self, index: int) -> ExpertSpec | None:
        count = self.num_local_experts or self.num_experts
        if count < 1 or index in (self.mlp_only_layers or ()) or (index + 1) % self.decoder_sparse_step:
            return None
        routing = Routing(experts=count, chosen=self.num_experts_per_tok, normalised=self.norm_topk_prob)
        return ExpertSpec(
            routing=routing,
            width=self.moe_intermediate_size,
            activation=self.hidden_act,
            saved=self.saved,
            shared=self.shared(),
        )

    def shared(self) -> SharedExpert | None:
        return None


class Qwen2MoeFields(QwenMoeFields, frozen=True, kw_only=True):
    shared_expert_intermediate_size: Size = 5632
    qkv_bias: bool = True

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), qkv_bias=self.qkv_bias)

    def shared(self) -> SharedExpert:
        return SharedExpert("shared_expert", self.shared_expert_intermediate_size, gate="shared_expert_gate")


class Qwen3MoeFields(QwenMoeFields, frozen=True, kw_only=True):
    num_experts: int = 128
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 768

    def window(self, index: int) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


class Qwen3VLMoeFields(Qwen3MoeFields, frozen=True, kw_only=True):
    """The text of Qwen3-VL-MoE, which saves one tensor for all experts of a layer."""

    saved: ClassVar[SavedExperts] = SavedExperts(in_one=True, transposed=True)

    norm_topk_prob: bool = True


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen2-MoE: Qwen2 with experts, beside which all tokens share one behind a gate."""

    fields = Qwen2MoeFields
    fixed = {"o_bias": False}


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3-MoE: Qwen3 with experts."""

    fields = Qwen3MoeFields
    fixed = {"qk_norm": "head"}


class Qwen3VLMoeForCausalLM(Qwen3MoeForCausalLM):
    fields = Qwen3VLMoeFields


class Ernie45MoeFields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 500000.0

    rms_norm_eps: float = 1e-5
    use_bias: bool = False
    moe_intermediate_size: Size = 1536
    moe_k: Size = 6
    moe_num_experts: Size = 64
    moe_num_shared_experts: int = 2
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = -1
    """The last layer that may have experts; -1 means that of the model."""
    moe_layer_interval: Size = 1
    moe_norm_min: float = 1e-12

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if self.use_bias:
            raise ConfigError(
                "config.json of this ERNIE has biases ('use_bias'), which no published one has: "
                "--model-impl transformers serves it"
            )
        return super().spec(setup, rope)

    def experts(self, index: int) -> ExpertSpec | None:
        if not self.has_experts(index):
            return None
        width, shared = self.moe_intermediate_size, None
        if self.moe_num_shared_experts:
            shared = SharedExpert("shared_experts", self.moe_num_shared_experts * width)
        return ExpertSpec(
            routing=Routing(experts=self.moe_num_experts, chosen=self.moe_k, least_sum=self.moe_norm_min),
            width=width,
            activation=self.hidden_act,
            correction="moe_statics.e_score_correction_bias",
            shared=shared,
        )

    def has_experts(self, index: int) -> bool:
        ended = 0 <= self.moe_layer_end_index < index
        return (
            index >= self.moe_layer_start_index and not ended and (index + 1) % self.moe_layer_interval == 0
        )


class Ernie45MoeForCausalLM(DecoderForCausalLM):
    """ERNIE 4.5 MoE: scores with a correction, shared experts, rotation of neighbouring dimensions."""

    fields = Ernie45MoeFields
    fixed = {"turns_neighbours": True, **WITHOUT_BIASES}


class DeepSeekExperts(DecoderFields, frozen=True, kw_only=True):
    """The fields of experts that DeepSeek named first, and the choice by sigmoid scores of its V3."""

    scores: ClassVar[Literal["softmax", "sigmoid"]] = "sigmoid"
    correction: ClassVar[str] = "gate.e_score_correction_bias"
    saved: ClassVar[SavedExperts] = SavedExperts()

    n_routed_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    n_shared_experts: int | None = None
    n_group: Size | None = 1
    topk_group: Size | None = 1
    norm_topk_prob: bool | None = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int | None = 0
    """The number of first layers that have an MLP instead."""
    moe_layer_freq: Size = 1
    """The distance of layers with experts, counted from the first layer of all."""
    mlp_layer_types: tuple[str, ...] | None = None
    """The kind of each layer, where transformers wrote it: "dense" or "sparse"."""

    def has_experts(self, index: int) -> bool:
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[index] == "sparse"
        return index >= (self.first_k_dense_replace or 0) and index % self.moe_layer_freq == 0

    def experts(self, index: int) -> ExpertSpec | None:
        if not self.has_experts(index):
            return None
        shared = None
        if self.n_shared_experts:
            shared = SharedExpert("shared_experts", self.n_shared_experts * self.moe_intermediate_size)
        return ExpertSpec(
            routing=self.routing(),
            width=self.moe_intermediate_size,
            activation=self.hidden_act,
            correction=self.correction,
            saved=self.saved,
            shared=shared,
        )

    def routing(self) -> Routing:
        return Routing(
            experts=self.n_routed_experts,
            chosen=self.num_experts_per_tok,
            scores=self.scores,
            normalised=bool(self.norm_topk_prob),
            epsilon=1e-20,
            factor=self.routed_scaling_factor,
            groups=self.n_group or 1,
            kept_groups=self.topk_group or 1,
        )


class Glm4MoeFields(DeepSeekExperts, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    use_qk_norm: bool = False
    first_k_dense_replace: int | None = 1

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), qk_norm="head" if self.use_qk_norm else None)


class Dots1Fields(DeepSeekExperts, frozen=True, kw_only=True):
    norm_topk_prob: bool | None = False
    sliding_window: int | None = 4096
    max_window_layers: int | None = 62
    """The number of lower layers that have no window."""

    def window(self, index: int) -> int | None:
        is_upper = self.max_window_layers is not None and index >= self.max_window_layers
        return self.sliding_window if self.slides(index, is_upper) else None


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """GLM-4.5: sigmoid scores with a correction, groups of experts, and shared ones."""

    fields = Glm4MoeFields
    fixed = {"o_bias": False}


class Dots1ForCausalLM(DecoderForCausalLM):
    """dots.llm1: the same with normalised heads, and windows in upper layers."""

    fields = Dots1Fields
    fixed = {"qk_norm": "head"}
