"""GPT-2 and the decoders after its pattern: layer norms with biases, and MLPs without gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from models.config import ConfigError, Eps, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec, Norms
from models.families.decoders.llama import LlamaFields
from models.layers.embedding import check_learned_positions
from models.layers.rotary import Rope, plain_rope, read_rope
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
    """GPT-2: learned positions, layer norms, one matrix for q, k and v, and matrices stored as [in, out]."""

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


class GPTBigCodeFields(GPT2Fields, frozen=True, kw_only=True):
    hidden_act: str = msgspec.field(name="activation_function", default="gelu_pytorch_tanh")
    multi_query: bool = True
    """Whether all query heads share a key head; else q, k and v lie together head by head."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), qkv="in one" if self.multi_query else "by head")


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """GPT-BigCode (StarCoder, SantaCoder): GPT-2 with matrices [out, in], and one key head for all."""

    fields = GPTBigCodeFields
    fixed = {
        name: value for name, value in GPT2LMHeadModel.fixed.items() if name not in ("qkv", "transposed")
    }


class GPTJFields(GPTFields, frozen=True, kw_only=True):
    rotary_dim: Size | None = 64

    def rope(self, setup: ModelSetup) -> Rope:
        return plain_rope(self.default_theta, self.rotary_dim or setup.config.head_dim)


class GPTJForCausalLM(DecoderForCausalLM):
    """GPT-J: attention and MLP beside each other behind one norm, and rotation of a part of each head."""

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
    """GPT-NeoX and Pythia: attention and MLP beside each other, and q, k and v in one matrix head by head."""

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


_FIRST_POSITION = 2  # rows 0 and 1 of the position table were meant for padding
_NORMS_BEFORE = Norms(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm")
_NORMS_AFTER = Norms(after_attention="self_attn_layer_norm", after_mlp="final_layer_norm")


class OPTFields(DecoderFields, frozen=True, kw_only=True):
    intermediate_size: Size = msgspec.field(name="ffn_dim")
    hidden_act: str = msgspec.field(name="activation_function", default="relu")
    word_embed_proj_dim: int | None = None
    do_layer_norm_before: bool = True
    enable_bias: bool = True
    remove_final_layer_norm: bool = msgspec.field(name="_remove_final_layer_norm", default=False)

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        learned, before, bias = setup.config.max_len, self.do_layer_norm_before, self.enable_bias
        check_learned_positions("OPT", learned, setup.max_len)
        return replace(
            super().spec(setup, rope),
            eps=1e-5,
            norms=_NORMS_BEFORE if before else _NORMS_AFTER,
            norms_sums=not before,
            final_norm=before and not self.remove_final_layer_norm,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            learned_positions=learned + _FIRST_POSITION,
            first_position=_FIRST_POSITION,
            embedding_width=self.word_embed_proj_dim,
        )

    def sees_positions(self, index: int) -> bool:
        return False


class OPTForCausalLM(DecoderForCausalLM):
    """OPT: learned positions that begin at 2, norms before or after, embeddings narrower than the layers."""

    fields = OPTFields
    fixed = LAYER_NORMS
    trunks = ("model.decoder", "decoder")
    saved_names = {
        "o_proj": "out_proj",
        "mlp": "",
        "up_proj": "fc1",
        "down_proj": "fc2",
        "norm": "final_layer_norm",
    }


class Starcoder2Fields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = msgspec.field(name="norm_epsilon", default=1e-5)
    hidden_act: str = "gelu_pytorch_tanh"
    use_bias: bool = True

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        bias = self.use_bias
        return replace(super().spec(setup, rope), qkv_bias=bias, o_bias=bias, mlp_bias=bias)

    def window(self, index: int) -> int | None:
        return self.sliding_window


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """StarCoder 2: layer norms, MLPs without gates, and biases everywhere, with rotation and windows."""

    fields = Starcoder2Fields
    fixed = LAYER_NORMS
    saved_names = {"up_proj": "c_fc", "down_proj": "c_proj"}


class NemotronFields(LlamaFields, frozen=True, kw_only=True):
    default_part: ClassVar[float] = 0.5

    rms_norm_eps: Eps = msgspec.field(name="norm_eps", default=1e-5)
    hidden_act: str = "relu2"


class NemotronForCausalLM(DecoderForCausalLM):
    """Nemotron-4 and Minitron: layer norms of 1 + w, and MLPs without gates that square what is positive."""

    fields = NemotronFields
    fixed = {**LAYER_NORMS, "norm_offset": 1.0}


class PhiFields(DecoderFields, frozen=True, kw_only=True):
    default_part: ClassVar[float] = 0.5

    rms_norm_eps: Eps = msgspec.field(name="layer_norm_eps", default=1e-5)
    hidden_act: str = "gelu_new"
    qk_layernorm: bool = False

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if self.qk_layernorm:
            raise ConfigError(
                "config.json of this Phi normalises queries and keys ('qk_layernorm'), which no published "
                "one does: --model-impl transformers serves it"
            )
        return super().spec(setup, rope)


class PhiForCausalLM(DecoderForCausalLM):
    """Phi-1, 1.5 and 2: attention and MLP beside each other behind one norm, and biases everywhere."""

    fields = PhiFields
    fixed = {
        **LAYER_NORMS,
        **ALL_BIASES,
        "norms": Norms(before_attention="input_layernorm"),
        "is_parallel": True,
        "head_bias": True,
    }
    saved_names = {"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "norm": "final_layernorm"}
