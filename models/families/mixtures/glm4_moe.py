"""GLM-4.5 and dots.llm1: sigmoid scores with a correction, groups of experts, and shared ones."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from models.config import Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec, SharedExpert
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing


class DeepSeekExperts(DecoderFields, frozen=True, kw_only=True):
    """The fields of experts that DeepSeek named first, and the choice by sigmoid scores of its V3."""

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
            scores="sigmoid",
            normalised=bool(self.norm_topk_prob),
            epsilon=1e-20,
            factor=self.routed_scaling_factor,
            groups=self.n_group or 1,
            kept_groups=self.topk_group or 1,
        )


class Glm4MoeFields(DeepSeekExperts, frozen=True, kw_only=True):
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
    fields = Glm4MoeFields
    fixed = {"o_bias": False}


class Dots1ForCausalLM(DecoderForCausalLM):
    fields = Dots1Fields
    fixed = {"qk_norm": "head"}
