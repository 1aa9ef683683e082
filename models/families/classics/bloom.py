"""BLOOM: scores that fall with distance in place of positions, and a norm behind the embeddings."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from models.config import ConfigError, Eps, Size
from models.families.classics.falcon import NAMES
from models.families.classics.gpt2 import ALL_BIASES, GPT_TRUNKS, LAYER_NORMS
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec
from models.layers.attention import alibi_slopes
from models.layers.rotary import Rope
from models.model import ModelSetup


class BloomFields(DecoderFields, frozen=True, kw_only=True):
    intermediate_size: Size = 0
    rms_norm_eps: Eps = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    apply_residual_connection_post_layernorm: bool = False
    qkv_in_one: bool = False
    """Whether q, k and v lie one behind the other in their matrix: so GGUF files have them."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if self.apply_residual_connection_post_layernorm:
            raise ConfigError(
                "config.json: the stream behind norms ('apply_residual_connection_post_layernorm'), which no "
                "published BLOOM has, is not served: it must be false"
            )
        return replace(
            super().spec(setup, rope),
            intermediate_size=4 * setup.config.hidden_size,
            qkv="in one" if self.qkv_in_one else "by head",
            slopes=alibi_slopes(setup.config.num_heads),
        )

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        return (LayerSpec(rope=None),) * setup.config.num_layers


class BloomForCausalLM(DecoderForCausalLM):
    fields = BloomFields
    fixed = {
        **LAYER_NORMS,
        **ALL_BIASES,
        "activation": "gelu_new",
        "embedding_norm": True,
    }
    trunks = GPT_TRUNKS
    saved_names = {**NAMES, "embed_norm": "word_embeddings_layernorm"}
