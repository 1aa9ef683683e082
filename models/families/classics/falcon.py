"""Falcon: attention and MLP beside each other behind one norm or two, with rotation or, at first, alibi."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from models.config import Eps, Size
from models.families.classics.gpt2 import GPT_TRUNKS, LAYER_NORMS
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import PRE_NORMS, DecoderFields, DecoderSpec, LayerSpec, Norms
from models.layers.attention import alibi_slopes
from models.layers.rotary import Rope
from models.model import ModelSetup

NAMES = {
    "embed_tokens": "word_embeddings",
    "layers": "h",
    "self_attn": "self_attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "norm": "ln_f",
}


class FalconFields(DecoderFields, frozen=True, kw_only=True):
    intermediate_size: Size = 0
    ffn_hidden_size: Size | None = None
    """The inner features of MLPs; None means four times those of the stream."""
    rms_norm_eps: Eps = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    hidden_act: str = msgspec.field(name="activation", default="gelu")
    bias: bool = False
    alibi: bool = False
    new_decoder_architecture: bool = False
    """Whether key heads lie beside their queries in one matrix, and the MLP may have a norm of its own."""
    num_ln_in_parallel_attn: int | None = None
    multi_query: bool = True
    parallel_attn: bool = True
    qkv_in_one: bool = False
    """Whether q, k and v lie one behind the other in their matrix: so GGUF files have them."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        is_new, spec = self.new_decoder_architecture, super().spec(setup, rope)
        slopes = [spec.attention_scale * slope for slope in alibi_slopes(setup.config.num_heads)]
        return replace(
            spec,
            intermediate_size=self.ffn_hidden_size or 4 * setup.config.hidden_size,
            norms=self.norms(),
            is_parallel=is_new or self.parallel_attn,
            qkv="by head" if not self.qkv_in_one and (is_new or not self.multi_query) else "in one",
            qkv_bias=self.bias,
            o_bias=self.bias,
            mlp_bias=self.bias,
            slopes=slopes if self.alibi else None,
        )

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        return (LayerSpec(rope=None if self.alibi else rope),) * setup.config.num_layers

    def norms(self) -> Norms:
        if not self.parallel_attn:
            return PRE_NORMS
        if self.new_decoder_architecture and self.num_ln_in_parallel_attn in (None, 2):
            of_mlp = "input_layernorm" if self.qkv_in_one else "ln_mlp"
            return Norms(before_attention="ln_attn", before_mlp=of_mlp)
        return Norms(before_attention="input_layernorm")


class FalconForCausalLM(DecoderForCausalLM):
    fields = FalconFields
    fixed = LAYER_NORMS
    trunks = GPT_TRUNKS
    saved_names = NAMES
