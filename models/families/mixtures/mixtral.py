"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from models.config import Size, family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, LayerSpec
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup
from models.ops.routing import Routing

SAVED = SavedExperts(gate="w1", up="w3", down="w2")


class MixtralFields(DecoderFields, frozen=True, kw_only=True):
    num_local_experts: Size = 8
    num_experts_per_tok: Size = 2


class MixtralForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, MixtralFields)
        rope = read_rope(config.raw, config.head_dim, setup.max_len, default_theta=1000000.0)
        experts = ExpertSpec(
            routing=Routing(experts=fields.num_local_experts, chosen=fields.num_experts_per_tok),
            width=fields.intermediate_size,
            activation=fields.hidden_act,
            scope="block_sparse_moe",
            saved=SAVED,
        )
        layer = LayerSpec(rope=rope, window=fields.sliding_window, experts=experts)
        super().__init__(setup, fields.spec(config, (layer,) * config.num_layers))
