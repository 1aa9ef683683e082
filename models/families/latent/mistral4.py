"""Mistral 4: latent attention whose queries grow with their position, and experts by softmax scores.

Where config.json says `mscale_all_dim`, YaRN sharpens scores, as in transformers; docs/roadmap.md has doubts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.families.decoders.llama import GrowthFields
from models.families.latent.latent_decoder import LatentForCausalLM
from models.families.mixtures import DeepSeekExperts
from models.layers.experts import SavedExperts
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing


class Mistral4Rope(GrowthFields, frozen=True):
    """The rope parameters that families with latent attention do not share."""

    partial_rotary_factor: float | None = None
    """The part of a whole head that is rotated; None means that 'qk_rope_head_dim' says it."""


class Mistral4Fields(DeepSeekExperts, frozen=True, kw_only=True):
    correction: ClassVar[str] = ""
    saved: ClassVar[SavedExperts] = SavedExperts(in_one=True)

    n_shared_experts: int | None = 1
    rope_parameters: Mistral4Rope

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), query_growth=self.rope_parameters.growth(setup.max_len))

    def routing(self) -> Routing:
        return Routing(
            experts=self.n_routed_experts,
            chosen=self.num_experts_per_tok,
            normalised=bool(self.norm_topk_prob),
            epsilon=1e-20,
            factor=self.routed_scaling_factor,
            groups=self.n_group or 1,
            kept_groups=self.topk_group or 1,
        )


class Mistral4ForCausalLM(LatentForCausalLM):
    fields = Mistral4Fields

    def rope(self, setup: ModelSetup, fields: DecoderFields, width: int) -> Rope:
        in_part = isinstance(fields, Mistral4Fields) and fields.rope_parameters.partial_rotary_factor
        return super().rope(setup, fields, setup.config.head_dim if in_part else width)
