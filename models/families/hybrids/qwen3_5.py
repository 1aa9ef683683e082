"""Qwen3.5, Qwen3.6 and Qwen3-Next: three layers of linear attention to one of attention; MLPs or experts."""

from __future__ import annotations

from typing import ClassVar, Literal

from models.config import ConfigError, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import LayerSpec
from models.families.hybrids.layer_kinds import FULL, LINEAR, check_kinds
from models.families.mixtures import QwenMoeFields
from models.layers.delta import DeltaSpec
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec, SharedExpert
from models.layers.rotary import Rope, read_rope
from models.model import ModelSetup


class HybridFields(QwenMoeFields, frozen=True, kw_only=True):
    """The fields of layers of both kinds, with the defaults that transformers has for them."""

    full_attention_interval: Size = 4
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    linear_projections: Literal["by part", "by key head", "gates by key head"] = "by part"
    """How matrices of linear attention lie: GGUF files of Qwen3-Next have them otherwise than its own."""
    linear_value_heads_take_turns: bool = False
    """Whether value heads that share a key head are not neighbours: so GGUF files have them."""

    def rope(self, setup: ModelSetup) -> Rope:
        raw = {"partial_rotary_factor": 0.25, **setup.config.raw}
        return read_rope(raw, setup.config.head_dim, setup.max_len)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        delta, kinds = self.delta(), self.kinds(setup.config.num_layers)
        return tuple(
            LayerSpec(rope=rope, experts=self.experts(index))
            if kind == FULL
            else LayerSpec(rope=None, state=delta, experts=self.experts(index))
            for index, kind in enumerate(kinds)
        )

    def delta(self) -> DeltaSpec:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ConfigError(
                f"config.json: {self.linear_num_value_heads} value heads cannot share "
                f"{self.linear_num_key_heads} key heads evenly ('linear_num_value_heads' must be a multiple "
                "of 'linear_num_key_heads')"
            )
        return DeltaSpec(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            taps=self.linear_conv_kernel_dim,
            eps=self.rms_norm_eps,
            saved=self.linear_projections,
            takes_turns=self.linear_value_heads_take_turns,
        )

    def kinds(self, count: int) -> tuple[str, ...]:
        """The kinds of so many layers."""
        if self.layer_types is None:
            return tuple(LINEAR if (i + 1) % self.full_attention_interval else FULL for i in range(count))
        return check_kinds(self.layer_types, count, (LINEAR, FULL), "layer_types")

    def experts(self, index: int) -> ExpertSpec | None:
        return None


class HybridMoeFields(HybridFields, frozen=True, kw_only=True):
    """Hybrids with experts in every layer, and one that all tokens take."""

    saved: ClassVar[SavedExperts] = SavedExperts(in_one=True)

    intermediate_size: Size = 1
    """The inner features of MLPs in place of experts, of which most have none."""
    num_experts: int = 256
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512
    norm_topk_prob: bool = True

    def experts(self, index: int) -> ExpertSpec | None:
        return QwenMoeFields.experts(self, index)

    def shared(self) -> SharedExpert:
        return SharedExpert("shared_expert", self.shared_expert_intermediate_size, gate="shared_expert_gate")


class Qwen3NextFields(HybridMoeFields, frozen=True, kw_only=True):
    saved: ClassVar[SavedExperts] = SavedExperts()
    linear_projections: Literal["by part", "by key head", "gates by key head"] = "by key head"
    intermediate_size: Size = 5632
    num_experts: int = 512
    num_experts_per_tok: Size = 10


class Qwen35ForCausalLM(DecoderForCausalLM):
    fields = HybridFields
    fixed = {"qk_norm": "head", "norm_offset": 1.0, "output_gate": True}
    saved_names = {"state": "linear_attn", "head_norm": "norm"}
    next_token_scope = "mtp"


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    fields = HybridMoeFields


class Qwen3NextForCausalLM(Qwen35ForCausalLM):
    fields = Qwen3NextFields
