"""GGUF's names of tensors, and the changes that its converter makes in them: a table for each architecture.

No torch. A tensor whose name is in no table keeps it; loading tells that it has no place in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from models.gguf import gemma


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The names of modules in the checkpoints of a family, by those of GGUF, and the changes to undo."""

    modules: Mapping[str, str]
    """The modules outside of layers."""
    layers: str = "model.layers"
    """The scope of the layers."""
    parts: Mapping[str, str]
    """The modules of a layer."""
    neighbours: tuple[str, ...] = ()
    """Parts whose rows are ordered for a rotation of neighbours: halves of each head are interleaved."""
    shifted_norms: bool = False
    """Whether 1 was added to the weights of norms."""
    plain_norms: tuple[str, ...] = ()
    """Norms to which it was not added all the same."""
    exponents: tuple[str, ...] = ()
    """Parts of which the file has the negated exponentials."""
    convolutions: tuple[str, ...] = ()
    """Parts [channels, taps] that the checkpoint stores as [channels, 1, taps]."""
    transposed: tuple[str, ...] = ()
    """Parts that the checkpoint stores as [inputs, outputs] and GGUF as [outputs, inputs]."""
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The modules of an expert by the parts that hold those of all. If two, each has half of the rows."""
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of tensors in a layer by their parts and kinds, where the kind is not the last word."""
    stacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names of matrices that lie in one tensor outside of layers, by its name; {} is a number."""
    flat: tuple[str, ...] = ()
    """Parts of one number for each head or feature, which files have as columns or in groups."""
    of_one_row: tuple[str, ...] = ()
    """Parts that are a matrix of one row, which some files have as a vector."""


_DECODER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    # Latent attention. Older files have one matrix of keys and values, newer ones two (see `tensors.py`).
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    # Layers for multi-token prediction, which files number on after the last layer of the model.
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
"""The parts of decoders' layers, of which each has some. Families change names in it."""


def _experts(scope: str = "mlp.experts", *names: str) -> dict[str, tuple[str, ...]]:
    """The modules of an expert, in whose names {} stands for its number; `names` are of gate, up and down."""
    names = names or ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (f"{scope}.{{}}.{name}" for name in names)
    return {
        "ffn_gate_exps": (gate,),
        "ffn_up_exps": (up,),
        "ffn_gate_up_exps": (gate, up),
        "ffn_down_exps": (down,),
    }


_PLAIN = Architecture(modules=_DECODER, parts=_PARTS)
_LLAMA = replace(_PLAIN, neighbours=("attn_q", "attn_k"))
_GEMMA = replace(_PLAIN, shifted_norms=True)
_SANDWICHED = replace(_GEMMA, parts={**_PARTS, "ffn_norm": "pre_feedforward_layernorm"})
_GEMMA4 = Architecture(
    modules={**_DECODER, **gemma.MODULES},
    parts={**_PARTS, **gemma.PARTS},
    stacks=gemma.STACKS,
    experts=_experts("experts"),
    tensors=gemma.TENSORS,
)
_MIXTURE = replace(_PLAIN, experts=_experts())
_CORRECTED = replace(_MIXTURE, tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"})
_BLOCK_SPARSE = {**_PARTS, "ffn_gate_inp": "block_sparse_moe.gate"}
_BLOCK_SPARSE_EXPERTS = _experts("block_sparse_moe.experts", "w1", "w3", "w2")
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LINEAR_ATTENTION = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_HYBRID = replace(
    _PLAIN,
    shifted_norms=True,
    plain_norms=("ssm_norm",),
    tensors={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    exponents=("ssm_a",),
    convolutions=("ssm_conv1d",),
)
_HYBRID_MIXTURE = replace(
    _HYBRID,
    parts={**_PARTS, **_SHARED_EXPERT, **_LINEAR_ATTENTION},
    experts=_experts(),
    of_one_row=("ffn_gate_inp_shexp",),
)
_BLOOM = Architecture(
    modules={
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layers="transformer.h",
    parts={
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
_LFM2 = Architecture(
    modules={**_DECODER, "token_embd_norm": "model.embedding_norm"},
    parts={
        **_PARTS,
        "attn_norm": "operator_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "attn_output": "self_attn.out_proj",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
    },
    convolutions=("shortconv.conv",),
    experts=_experts("feed_forward.experts", "w1", "w3", "w2"),
    tensors={"exp_probs_b.bias": "feed_forward.expert_bias"},
)


def _mamba(base: Architecture, scope: str, parts: Mapping[str, str], **tensors: str) -> Architecture:
    """An architecture with Mamba-2 in the `scope` of layers; `tensors` are those without a kind."""
    own = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    numbers = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return replace(
        base,
        parts={**base.parts, **{part: f"{scope}.{name}" for part, name in own.items()}, **parts},
        tensors={**{part: f"{scope}.{name}" for part, name in numbers.items()}, **tensors},
        exponents=("ssm_a",),
        convolutions=("ssm_conv1d",),
        flat=("ssm_a", "ssm_d", "ssm_norm"),
    )


_GRANITE_MIXTURE = replace(
    _LLAMA,
    parts={
        **_PARTS,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_shexp": "shared_mlp.gate_proj",
        "ffn_up_shexp": "shared_mlp.up_proj",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    experts=_experts("block_sparse_moe.experts"),
)
_GRANITE_MLP = {
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
}
_FALCON_H1 = replace(_PLAIN, modules={**_DECODER, "output_norm": "model.final_layernorm"})
_FALCON_H1_PARTS = {
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_MIXER = {
    **{part: name.replace("self_attn.", "mixer.") for part, name in _PARTS.items()},
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NEMOTRON_H = Architecture(
    modules={**_DECODER, "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    layers="backbone.layers",
    parts=_MIXER,
    experts=_experts("mixer.experts"),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": replace(_LLAMA, parts=_BLOCK_SPARSE, experts=_BLOCK_SPARSE_EXPERTS),
    "arcee": _LLAMA,
    "ernie4_5": _PLAIN,
    "seed_oss": _PLAIN,
    "granite": _LLAMA,
    "internlm2": _LLAMA,  # its converter takes the one matrix of q, k and v apart
    "smollm3": _LLAMA,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "gemma": _GEMMA,
    "gemma2": _SANDWICHED,
    "gemma3": _SANDWICHED,
    "gemma3n": _GEMMA4,
    "gemma4": _GEMMA4,
    "olmo2": _PLAIN,
    "phi3": replace(_PLAIN, parts={**_PARTS, "ffn_up": "mlp.gate_up_proj"}),
    "gpt2": Architecture(
        modules={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
        parts={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "bloom": _BLOOM,
    "falcon": replace(_BLOOM, parts={**_BLOOM.parts, "attn_norm_2": "ln_attn"}),
    "mpt": Architecture(
        modules={
            "token_embd": "transformer.wte",
            "output_norm": "transformer.norm_f",
            "output": "lm_head",
        },
        layers="transformer.blocks",
        parts={
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
    ),
    "bert": Architecture(
        modules={
            "token_embd": "embeddings.word_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
            "cls": "pooler.dense",
            "cls.output": "classifier",
        },
        layers="encoder.layer",
        of_one_row=("cls.output",),
        parts={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
    "nomic-bert": Architecture(
        modules={
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "emb_ln",
        },
        layers="encoder.layers",
        parts={
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
    ),
    "qwen2moe": replace(
        _MIXTURE,
        parts={**_PARTS, **_SHARED_EXPERT},
        of_one_row=("ffn_gate_inp_shexp",),
    ),
    "qwen3moe": _MIXTURE,
    "qwen35": replace(_HYBRID, parts={**_PARTS, **_LINEAR_ATTENTION}),
    "qwen35moe": _HYBRID_MIXTURE,
    "qwen3next": replace(
        _HYBRID_MIXTURE,
        parts={
            **_HYBRID_MIXTURE.parts,
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
    ),
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "granitehybrid": replace(
        _mamba(_GRANITE_MIXTURE, "mamba", _GRANITE_MLP),
        experts=_experts("block_sparse_moe.experts", "gate_proj", "up_proj", "output_linear"),
    ),
    "falcon-h1": _mamba(_FALCON_H1, "mamba", _FALCON_H1_PARTS, ffn_norm="pre_ff_layernorm.weight"),
    "nemotron_h": _mamba(_NEMOTRON_H, "mixer", {}),
    "nemotron_h_moe": _mamba(
        _NEMOTRON_H, "mixer", {}, **{"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"}
    ),
    "olmoe": _MIXTURE,
    "granitemoe": _GRANITE_MIXTURE,
    "gpt-oss": replace(
        _MIXTURE,
        parts={**_PARTS, "ffn_gate_inp": "mlp.router"},
        tensors={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "glm4moe": _CORRECTED,
    "deepseek2": _CORRECTED,
    "dots1": _CORRECTED,
    "ernie4_5-moe": replace(
        _MIXTURE, tensors={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
    ),
    "minimax-m2": replace(
        _PLAIN,
        parts=_BLOCK_SPARSE,
        experts=_BLOCK_SPARSE_EXPERTS,
        tensors={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    ),
}
"""The architectures that are read, by the name that the field `general.architecture` has."""
