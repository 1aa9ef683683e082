"""Granite 3 MoE: Granite with experts in every layer, and in some models a shared one."""

from __future__ import annotations

from models.config import Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.llama import GraniteFields
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec, SharedExpert
from models.ops.expert_routing_ops import Routing

_SAVED = SavedExperts(all_gate_up="input_linear.weight", all_down="output_linear.weight", in_one=True)


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
            saved=_SAVED,
            shared=shared,
        )


class GraniteMoeForCausalLM(DecoderForCausalLM):
    fields = GraniteMoeFields
