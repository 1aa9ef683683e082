"""Granite 4: Granite in which most layers have Mamba-2 in place of attention, with MLPs or experts."""

from __future__ import annotations

from dataclasses import replace

from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderSpec, LayerSpec
from models.families.hybrids.layer_kinds import FULL, LINEAR, check_kinds
from models.families.hybrids.mamba_fields import mixed_layers
from models.families.mixtures import GraniteMoeFields
from models.layers.moe import ExpertSpec
from models.layers.rotary import Rope
from models.model import ModelSetup


class GraniteHybridFields(GraniteMoeFields, frozen=True, kw_only=True):
    num_local_experts: int = 8
    """The experts of a layer; 0 means that the expert that all tokens share is an MLP of its own."""
    num_experts_per_tok: int = 2
    """The experts of a token, which is 0 in files without experts."""
    shared_intermediate_size: int = 1024
    position_embedding_type: str | None = None
    """The word "rope" where layers with attention see positions."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), intermediate_size=self.shared_intermediate_size)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        count = setup.config.num_layers
        kinds = (LINEAR,) * count if self.layer_types is None else self.layer_types
        kinds = check_kinds(kinds, count, (LINEAR, FULL), "layer_types")
        seen = rope if self.position_embedding_type == "rope" else None
        return mixed_layers(self, setup.config, kinds, seen)

    def experts(self, index: int) -> ExpertSpec | None:
        return super().experts(index) if self.num_local_experts else None


class GraniteMoeHybridForCausalLM(DecoderForCausalLM):
    fields = GraniteHybridFields
    fixed = {"gate_up_in_one": True}
    saved_names = {
        "state": "mamba",
        "mlp": "shared_mlp",
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
    }
