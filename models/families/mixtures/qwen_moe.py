"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts; Qwen2's have a shared expert with a gate."""

from __future__ import annotations

from typing import ClassVar

from models.config import Size, family_fields
from models.families.decoders.decoder import DecoderForCausalLM, LayerSpec
from models.families.decoders.qwen2 import QwenFields
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec, SharedExpert
from models.layers.rotary import read_rope
from models.model import ModelSetup
from models.ops.routing import Routing


class QwenMoeFields(QwenFields, frozen=True, kw_only=True):
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

    def experts(
        self, shared: SharedExpert | None = None, saved: SavedExperts = SavedExperts()
    ) -> ExpertSpec | None:
        count = self.num_local_experts or self.num_experts
        if count < 1:
            return None
        return ExpertSpec(
            routing=Routing(
                experts=count,
                chosen=self.num_experts_per_tok,
                normalised=self.norm_topk_prob,
            ),
            width=self.moe_intermediate_size,
            activation=self.hidden_act,
            shared=shared,
            saved=saved,
        )

    def has_experts(self, index: int) -> bool:
        return index not in (self.mlp_only_layers or ()) and (index + 1) % self.decoder_sparse_step == 0


class Qwen2MoeFields(QwenMoeFields, frozen=True, kw_only=True):
    shared_expert_intermediate_size: Size = 5632
    qkv_bias: bool = True


class Qwen3MoeFields(QwenMoeFields, frozen=True, kw_only=True):
    num_experts: int = 128
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 768


class Qwen3VLMoeFields(Qwen3MoeFields, frozen=True, kw_only=True):
    norm_topk_prob: bool = True


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, Qwen2MoeFields)
        shared = SharedExpert(
            "shared_expert", fields.shared_expert_intermediate_size, gate="shared_expert_gate"
        )
        windows = fields.windows(config)
        layers = _layers(setup, fields, fields.experts(shared), windows)
        super().__init__(setup, fields.spec(config, layers, qkv_bias=fields.qkv_bias))


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    fields_type: ClassVar[type[Qwen3MoeFields]] = Qwen3MoeFields
    saved: ClassVar[SavedExperts] = SavedExperts()

    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, self.fields_type)
        experts = fields.experts(saved=self.saved)
        window = fields.sliding_window if fields.use_sliding_window else None
        layers = _layers(setup, fields, experts, [window] * config.num_layers)
        spec = fields.spec(
            config,
            layers,
            qk_norm="head",
            qkv_bias=fields.attention_bias,
            o_bias=fields.attention_bias,
        )
        super().__init__(setup, spec)


class Qwen3VLMoeForCausalLM(Qwen3MoeForCausalLM):
    """The text of Qwen3-VL-MoE, which saves one tensor for all experts of a layer."""

    fields_type = Qwen3VLMoeFields
    saved = SavedExperts(in_one=True, transposed=True)


def _layers(
    setup: ModelSetup, fields: QwenMoeFields, experts: ExpertSpec | None, windows: list[int | None]
) -> tuple[LayerSpec, ...]:
    rope = read_rope(setup.config.raw, setup.config.head_dim, setup.max_len)
    return tuple(
        LayerSpec(rope=rope, window=window, experts=experts if fields.has_experts(index) else None)
        for index, window in enumerate(windows)
    )
