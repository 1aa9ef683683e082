"""MiniMax-M2: sigmoid scores with a correction, queries and keys normalised across heads."""

from __future__ import annotations

from models.config import Size, family_fields
from models.families.decoders.decoder import DecoderForCausalLM, LayerSpec
from models.families.mixtures.mixtral import SAVED, MixtralFields
from models.layers.moe import ExpertSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup
from models.ops.routing import Routing


class MiniMaxM2Fields(MixtralFields, frozen=True, kw_only=True):
    rotary_dim: Size | None = None
    """The dimensions of a head that are rotated, in the first checkpoints."""


class MiniMaxM2ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, MiniMaxM2Fields)
        raw = config.raw
        if fields.rotary_dim is not None:
            raw = raw | {"partial_rotary_factor": fields.rotary_dim / config.head_dim}
        rope = read_rope(raw, config.head_dim, setup.max_len, default_theta=5000000.0)
        experts = ExpertSpec(
            routing=Routing(
                experts=fields.num_local_experts, chosen=fields.num_experts_per_tok, scores="sigmoid"
            ),
            width=fields.intermediate_size,
            activation=fields.hidden_act,
            scope="block_sparse_moe",
            correction="e_score_correction_bias",
            saved=SAVED,
        )
        layer = LayerSpec(rope=rope, experts=experts)
        super().__init__(setup, fields.spec(config, (layer,) * config.num_layers, qk_norm="projection"))
