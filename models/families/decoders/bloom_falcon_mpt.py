"""BLOOM, Falcon and MPT: q, k and v in one matrix, and scores that may fall with distance (alibi)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec

from models.config import ConfigError, Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import PRE_NORMS, DecoderFields, DecoderSpec, Norms
from models.families.decoders.gpt import ALL_BIASES, GPT_TRUNKS, LAYER_NORMS
from models.layers.attention import alibi_slopes
from models.layers.rotary import Rope
from models.model import ModelSetup

_NAMES = {
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

    def sees_positions(self, index: int) -> bool:
        return not self.alibi

    def norms(self) -> Norms:
        if not self.parallel_attn:
            return PRE_NORMS
        if self.new_decoder_architecture and self.num_ln_in_parallel_attn in (None, 2):
            of_mlp = "input_layernorm" if self.qkv_in_one else "ln_mlp"
            return Norms(before_attention="ln_attn", before_mlp=of_mlp)
        return Norms(before_attention="input_layernorm")


class FalconForCausalLM(DecoderForCausalLM):
    """Falcon: attention and MLP side by side behind one norm or two, with rotation or, at first, alibi."""

    fields = FalconFields
    fixed = LAYER_NORMS
    trunks = GPT_TRUNKS
    saved_names = _NAMES


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

    def sees_positions(self, index: int) -> bool:
        return False


class BloomForCausalLM(DecoderForCausalLM):
    """BLOOM: scores that fall with distance in place of positions, and a norm behind the embeddings."""

    fields = BloomFields
    fixed = {
        **LAYER_NORMS,
        **ALL_BIASES,
        "activation": "gelu_new",
        "embedding_norm": True,
    }
    trunks = GPT_TRUNKS
    saved_names = {**_NAMES, "embed_norm": "word_embeddings_layernorm"}


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

    def sees_positions(self, index: int) -> bool:
        return False


class MptForCausalLM(DecoderForCausalLM):
    """MPT: scores that fall with distance in place of positions, and no biases."""

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
