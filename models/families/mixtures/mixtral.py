"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from typing import ClassVar, Literal

from models.config import Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import WITHOUT_BIASES, DecoderFields
from models.layers.experts import SavedExperts
from models.layers.moe import ExpertSpec
from models.ops.expert_routing_ops import Routing


class MixtralFields(DecoderFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 1000000.0
    scores: ClassVar[Literal["softmax", "sigmoid"]] = "softmax"
    correction: ClassVar[str] = ""

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
    fields = MixtralFields
    fixed = WITHOUT_BIASES
