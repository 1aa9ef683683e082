"""GPT-2: learned positions, layer norms, one matrix for q, k and v, and matrices stored as [in, out]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from models.config import Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec, Norms
from models.layers.embedding import check_learned_positions
from models.layers.rotary import Rope
from models.model import ModelSetup

LAYER_NORMS: dict[str, Any] = {"norm": "layer", "norm_bias": True, "is_gated": False}
"""A part of what is `fixed` in the families of this folder."""
ALL_BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
GPT_NORMS = Norms(before_attention="ln_1", before_mlp="ln_2")
GPT_TRUNKS = ("transformer", "")
"""The scopes of the trunk: the first checkpoints were saved without their heads."""


class GPTFields(DecoderFields, frozen=True, kw_only=True):
    """The fields of config.json under the names that GPT-2 gave them first."""

    intermediate_size: Size = 0
    n_inner: Size | None = None
    """The inner features of MLPs; None means four times those of the stream."""
    rms_norm_eps: Eps = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    hidden_act: str = msgspec.field(name="activation_function", default="gelu_new")

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        inner = self.n_inner or 4 * setup.config.hidden_size
        return replace(super().spec(setup, rope), intermediate_size=inner)


class GPT2Fields(GPTFields, frozen=True, kw_only=True):
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        learned = setup.config.max_len
        check_learned_positions(setup.config.architecture, learned, setup.max_len)
        return replace(super().spec(setup, rope), learned_positions=learned)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        scale = setup.config.head_dim**-0.5 if self.scale_attn_weights else 1.0
        by_layer = self.scale_attn_by_inverse_layer_idx
        return tuple(
            LayerSpec(rope=None, attention_scale=scale / (index + 1) if by_layer else scale)
            for index in range(setup.config.num_layers)
        )


class GPT2LMHeadModel(DecoderForCausalLM):
    fields = GPT2Fields
    fixed = {**LAYER_NORMS, **ALL_BIASES, "norms": GPT_NORMS, "qkv": "in one", "transposed": True}
    trunks = GPT_TRUNKS
    saved_names = {
        "embed_tokens": "wte",
        "embed_positions": "wpe",
        "layers": "h",
        "self_attn": "attn",
        "qkv_proj": "c_attn",
        "o_proj": "c_proj",
        "up_proj": "c_fc",
        "down_proj": "c_proj",
        "norm": "ln_f",
    }
