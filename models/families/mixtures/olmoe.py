"""OLMoE: experts in every layer, and queries and keys that are normalised across heads."""

from __future__ import annotations

from models.config import ConfigError, Size, family_fields
from models.families.decoders.decoder import DecoderFields, DecoderForCausalLM, LayerSpec
from models.layers.moe import ExpertSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup
from models.ops.routing import Routing


class OlmoeFields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: float = 1e-5
    num_experts: Size = 64
    num_experts_per_tok: Size = 8
    norm_topk_prob: bool = False
    clip_qkv: float | None = None


class OlmoeForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, OlmoeFields)
        if fields.clip_qkv is not None:
            raise ConfigError(
                "config.json of this OLMoE clips queries, keys and values ('clip_qkv'), which no published "
                "one does: --model-impl transformers serves it"
            )
        rope = read_rope(config.raw, config.head_dim, setup.max_len)
        experts = ExpertSpec(
            routing=Routing(
                experts=fields.num_experts,
                chosen=fields.num_experts_per_tok,
                normalised=fields.norm_topk_prob,
            ),
            width=fields.intermediate_size,
            activation=fields.hidden_act,
        )
        spec = fields.spec(
            config,
            (LayerSpec(rope=rope, experts=experts),) * config.num_layers,
            qk_norm="projection",
            qkv_bias=fields.attention_bias,
            o_bias=fields.attention_bias,
        )
        super().__init__(setup, spec)
