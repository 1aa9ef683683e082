"""GPT-J: attention and MLP beside each other behind one norm, and rotation of a part of each head."""

from __future__ import annotations

from models.config import Size
from models.families.classics.gpt2 import GPT_TRUNKS, LAYER_NORMS, GPTFields
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import Norms
from models.layers.rotary import Rope, plain_rope
from models.model import ModelSetup


class GPTJFields(GPTFields, frozen=True, kw_only=True):
    rotary_dim: Size | None = 64

    def rope(self, setup: ModelSetup) -> Rope:
        return plain_rope(self.default_theta, self.rotary_dim or setup.config.head_dim)


class GPTJForCausalLM(DecoderForCausalLM):
    fields = GPTJFields
    fixed = {
        **LAYER_NORMS,
        "norms": Norms(before_attention="ln_1"),
        "is_parallel": True,
        "turns_neighbours": True,
        "mlp_bias": True,
        "head_bias": True,
    }
    trunks = GPT_TRUNKS
    saved_names = {
        "embed_tokens": "wte",
        "layers": "h",
        "self_attn": "attn",
        "o_proj": "out_proj",
        "up_proj": "fc_in",
        "down_proj": "fc_out",
        "norm": "ln_f",
    }
