"""GPT-NeoX and Pythia: attention and MLP beside each other, and q, k and v in one matrix head by head."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from models.config import Eps
from models.families.classics.gpt2 import LAYER_NORMS
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.layers.rotary import Rope, read_rope
from models.model import ModelSetup


class GPTNeoXFields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = msgspec.field(name="layer_norm_eps", default=1e-5)
    hidden_act: str = "gelu"
    attention_bias: bool = True
    rotary_pct: float = 0.25
    rotary_emb_base: float = 10000.0
    use_parallel_residual: bool = True

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), is_parallel=self.use_parallel_residual)

    def rope(self, setup: ModelSetup) -> Rope:
        raw, head_dim = setup.config.raw, setup.config.head_dim
        raw = {"partial_rotary_factor": self.rotary_pct, "rope_theta": self.rotary_emb_base, **raw}
        return read_rope(raw, head_dim, setup.max_len)


class GPTNeoXForCausalLM(DecoderForCausalLM):
    fields = GPTNeoXFields
    fixed = {**LAYER_NORMS, "qkv": "by head", "mlp_bias": True}
    trunks = ("gpt_neox", "")
    saved_names = {
        "embed_tokens": "embed_in",
        "self_attn": "attention",
        "qkv_proj": "query_key_value",
        "o_proj": "dense",
        "up_proj": "dense_h_to_4h",
        "down_proj": "dense_4h_to_h",
        "norm": "final_layer_norm",
        "lm_head": "embed_out",
    }
