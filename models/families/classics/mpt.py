"""MPT: scores that fall with distance in place of positions, and no biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec

from models.config import ConfigError, Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec, Norms
from models.layers.attention import alibi_slopes
from models.layers.rotary import Rope
from models.model import ModelSetup


class MptAttentionFields(msgspec.Struct, frozen=True, kw_only=True):
    attn_type: str = "multihead_attention"
    alibi: bool = True
    alibi_bias_max: float = 8.0
    """The number whose negative is the exponent of the last slope."""
    clip_qkv: float | None = None
    softmax_scale: float | None = None
    qk_ln: bool = False
    prefix_lm: bool = False


class MptFields(DecoderFields, frozen=True, kw_only=True):
    intermediate_size: Size = 0
    expansion_ratio: float = 4
    """The inner features of MLPs by those of the stream."""
    rms_norm_eps: Eps = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    attn_config: MptAttentionFields = MptAttentionFields()
    logit_scale: float | Literal["inv_sqrt_d_model"] | None = None
    no_bias: bool = True

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        attention, size = self.attn_config, setup.config.hidden_size
        if not (attention.alibi and attention.attn_type == "multihead_attention" and self.no_bias) or (
            attention.qk_ln or attention.prefix_lm
        ):
            raise ConfigError(
                "config.json: of MPT only models as MPT-7B and MPT-30B are served, which have 'alibi', "
                "'multihead_attention' and 'no_bias', and neither 'qk_ln' nor 'prefix_lm'"
            )
        spec = super().spec(setup, rope)
        return replace(
            spec,
            intermediate_size=int(self.expansion_ratio * size),
            attention_scale=attention.softmax_scale or spec.attention_scale,
            qkv_limit=attention.clip_qkv or None,
            slopes=alibi_slopes(setup.config.num_heads, attention.alibi_bias_max),
            logit_scale=size**-0.5 if self.logit_scale == "inv_sqrt_d_model" else self.logit_scale or 1.0,
        )

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        return (LayerSpec(rope=None),) * setup.config.num_layers


class MptForCausalLM(DecoderForCausalLM):
    fields = MptFields
    fixed = {
        "norm": "layer",
        "norms": Norms(before_attention="norm_1", before_mlp="norm_2"),
        "is_gated": False,
        "activation": "gelu",
        "qkv": "in one",
    }
    trunks = ("transformer",)
    saved_names = {
        "embed_tokens": "wte",
        "layers": "blocks",
        "self_attn": "attn",
        "qkv_proj": "Wqkv",
        "o_proj": "out_proj",
        "mlp": "ffn",
        "norm": "norm_f",
    }
