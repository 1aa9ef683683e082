"""Granite 3 MoE: Granite with experts in every layer, and in some models a shared one."""

from __future__ import annotations

from models.config import Size, family_fields
from models.families.decoders.decoder import DecoderForCausalLM, LayerSpec
from models.families.decoders.granite import GraniteFields
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec, SharedExpert
from models.layers.rotary import read_rope
from models.model import ModelSetup
from models.ops.routing import Routing

_SAVED = SavedExperts(all_gate_up="input_linear.weight", all_down="output_linear.weight", in_one=True)


class GraniteMoeFields(GraniteFields, frozen=True, kw_only=True):
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2
    shared_intermediate_size: int = 0
    """The width of the expert that all tokens share; 0 means that there is none."""

    def experts(self) -> ExpertSpec:
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
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, GraniteMoeFields)
        rope = read_rope(config.raw, config.head_dim, setup.max_len)
        layers = (LayerSpec(rope=rope, experts=fields.experts()),) * config.num_layers
        super().__init__(setup, fields.spec_with_factors(config, layers))
