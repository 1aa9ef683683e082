"""Jamba: the first Mamba in most layers, attention without positions in others, with MLPs or experts."""

from __future__ import annotations

from typing import Literal

from models.config import Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import WITHOUT_BIASES, DecoderFields, LayerSpec
from models.families.hybrids.bamba import NAMES, NORMS
from models.layers.mamba import ChannelScanSpec
from models.layers.moe import ExpertSpec
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing


class JambaFields(DecoderFields, frozen=True, kw_only=True):
    num_experts: Size = 16
    """The experts of layers with some; 1 means that all have an MLP."""
    num_experts_per_tok: Size = 2
    expert_layer_period: Size = 2
    expert_layer_offset: int = 1
    attn_layer_period: Size = 8
    attn_layer_offset: int = 4
    mamba_d_state: Size = 16
    mamba_d_conv: Size = 4
    mamba_expand: Size = 2
    mamba_dt_rank: Size | Literal["auto"] = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        size = setup.config.hidden_size
        scan = ChannelScanSpec(
            channels=self.mamba_expand * size,
            state_size=self.mamba_d_state,
            rank=-(-size // 16) if self.mamba_dt_rank == "auto" else self.mamba_dt_rank,
            taps=self.mamba_d_conv,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            norm="weighted",
            eps=self.rms_norm_eps,
        )
        return tuple(
            LayerSpec(rope=None, state=None if self.attends(index) else scan, experts=self.experts(index))
            for index in range(setup.config.num_layers)
        )

    def attends(self, index: int) -> bool:
        """Whether a layer has attention."""
        return index % self.attn_layer_period == self.attn_layer_offset

    def experts(self, index: int) -> ExpertSpec | None:
        if self.num_experts == 1 or index % self.expert_layer_period != self.expert_layer_offset:
            return None
        chosen = self.num_experts_per_tok
        return ExpertSpec(
            routing=Routing(experts=self.num_experts, chosen=chosen, normalised=False),
            width=self.intermediate_size,
            activation=self.hidden_act,
            router="router",
        )


class JambaForCausalLM(DecoderForCausalLM):
    fields = JambaFields
    fixed = {"norms": NORMS, **WITHOUT_BIASES}
    saved_names = NAMES
