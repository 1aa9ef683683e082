"""OLMo 2: norms after attention and MLP instead of before, and norms over all query or key heads at once."""

from __future__ import annotations

from models.config import family_fields
from models.families.decoders.decoder import POST_NORMS, DecoderFields, DecoderForCausalLM, LayerSpec
from models.layers.rotary import read_rope
from models.model import ModelSetup


class Olmo2ForCausalLM(DecoderForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        config = setup.config
        fields = family_fields(config, DecoderFields)
        rope = read_rope(config.raw, config.head_dim, setup.max_len)
        layers = (LayerSpec(rope=rope),) * config.num_layers
        spec = fields.spec(
            config,
            layers,
            norms=POST_NORMS,
            qk_norm="projection",
            qkv_bias=fields.attention_bias,
            o_bias=fields.attention_bias,
        )
        super().__init__(setup, spec)
