"""InternLM2: Llama under other names, with queries, keys and values in one matrix, key head by key head."""

from __future__ import annotations

from dataclasses import replace

from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, Norms
from models.layers.rotary import Rope
from models.model import ModelSetup


class InternLM2Fields(DecoderFields, frozen=True, kw_only=True):
    bias: bool = False
    """Whether the four projections of attention have biases."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), qkv_bias=self.bias, o_bias=self.bias)


class InternLM2ForCausalLM(DecoderForCausalLM):
    fields = InternLM2Fields
    fixed = {"qkv": "by head", "norms": Norms(before_attention="attention_norm", before_mlp="ffn_norm")}
    saved_names = {
        "embed_tokens": "tok_embeddings",
        "self_attn": "attention",
        "qkv_proj": "wqkv",
        "o_proj": "wo",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "lm_head": "output",
    }
