"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts; Qwen2's have a shared expert with a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from models.config import Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderSpec
from models.families.decoders.llama import QwenFields
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec, SharedExpert
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing


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
    fields = Qwen2MoeFields
    fixed = {"o_bias": False}


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    fields = Qwen3MoeFields
    fixed = {"qk_norm": "head"}


class Qwen3VLMoeForCausalLM(Qwen3MoeForCausalLM):
    fields = Qwen3VLMoeFields
