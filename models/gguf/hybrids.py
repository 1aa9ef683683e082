"""Translates the metadata of hybrids, layers with states among others, into fields of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from models.gguf.families import DECODER, GRANITE, HEADS, Family, any_decoder, decoder, with_scale
from models.gguf.fields import Fields
from models.gguf.mixtures import EXPERT_WIDTH, EXPERTS, ROUTED, SHARED_WIDTH, SIGMOID

_ATTENTION = "full_attention"
_DELTA = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_MAMBA = {
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
    "mamba_d_state": "ssm.state_size",
    "mamba_d_conv": "ssm.conv_kernel",
}
_THETA = {"rope_theta": "rope.freq_base"}
"""What attention needs where its key heads are listed by layer."""


def _delta(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """Linear attention beside attention. In files the value heads of a key head are not neighbours."""
    heads = raw["linear_num_value_heads"]
    return _neighbours(fields, raw) | {"linear_value_heads_take_turns": heads != raw["linear_num_key_heads"]}


def _neighbours(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """Linear attention whose value heads lie beside those that have the same key head."""
    further = fields.number("nextn_predict_layers") or 0
    heads = cast("int", raw["linear_num_value_heads"])
    width, rest = divmod(cast("int", fields.need("ssm.inner_size")), heads)
    if rest:
        raise fields.wrong("ssm.inner_size", f"must be a multiple of the {heads} value heads")
    return any_decoder(fields, raw) | {
        "num_hidden_layers": cast("int", raw["num_hidden_layers"]) - further,
        "num_nextn_predict_layers": further,
        "linear_value_head_dim": width,
        "full_attention_interval": fields.number("full_attention_interval") or 4,
    }


def _qwen3_next(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """The first files have one matrix of all that a key head has, as the model's own checkpoint does."""
    first = fields.in_a_layer("ssm_in.weight")
    return _neighbours(fields, raw) | {"linear_projections": "by key head" if first else "gates by key head"}


def _key_heads(fields: Fields, raw: Mapping[str, object]) -> tuple[list[int], dict[str, object]]:
    """The key heads of each layer, of which some have no attention, and what is true of all."""
    further, every = fields.number("nextn_predict_layers") or 0, cast("int", raw["num_hidden_layers"])
    heads = fields.by_layer("attention.head_count_kv", every, least=0)[: every - int(further)]
    if len(counts := {count for count in heads if count}) > 1:
        raise fields.wrong("attention.head_count_kv", f"must be one number or 0 in each layer, not {heads}")
    return heads, any_decoder(fields, raw) | {
        "num_hidden_layers": len(heads),
        "num_nextn_predict_layers": further,
        "num_key_value_heads": max(counts, default=1),
    }


def _lfm2(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    fields.refuse("attention.sliding_window", "windows")
    heads, found = _key_heads(fields, raw)
    return found | {"layer_types": [_ATTENTION if count else "conv" for count in heads]}


def _lfm2_moe(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    fields.expect("expert_gating_func", SIGMOID)
    return _lfm2(fields, raw) | {"use_expert_bias": fields.in_a_layer("exp_probs_b.bias")}


def _biases(fields: Fields, *parts: str) -> list[bool]:
    """Whether these parts of layers have biases."""
    return [fields.in_a_layer(f"{part}.bias") for part in parts]


def _granite(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """Granite 4 and Bamba, with experts or an MLP that bears the name of the expert that all tokens share."""
    heads, found = _key_heads(fields, raw)
    size, inner = cast("int", raw["hidden_size"]), cast("int", fields.need("ssm.inner_size"))
    if inner % size:
        raise fields.wrong("ssm.inner_size", f"must be a multiple of the {size} features of hidden states")
    of_input, of_convolution = _biases(fields, "ssm_in", "ssm_conv1d")
    shared = fields.number("expert_shared_feed_forward_length")
    found |= {
        "layer_types": [_ATTENTION if count else "linear_attention" for count in heads],
        "mamba_expand": inner // size,
        "mamba_proj_bias": of_input,
        "mamba_conv_bias": of_convolution,
        "position_embedding_type": "nope" if fields.flag("rope.scaling.finetuned") is False else "rope",
        "num_local_experts": fields.number("expert_count") or 0,
        "shared_intermediate_size": shared or 0,
    }
    if not found["num_local_experts"]:
        found["shared_intermediate_size"] = raw["intermediate_size"]
    return with_scale(fields, found)


def _falcon_h1(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """Falcon-H1, whose factors of what is read and written are in the file's matrices."""
    of_input, of_convolution, of_output = _biases(fields, "ssm_in", "ssm_conv1d", "ssm_out")
    return any_decoder(fields, raw) | {
        "mamba_rms_norm": fields.in_a_layer("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": of_input,
        "mamba_conv_bias": of_convolution,
        "projectors_bias": of_output,
    }


def _nemotron_h(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """Nemotron-H, each layer of which is attention if it has key heads, Mamba-2, or a feed-forward block."""
    fields.expect("expert_group_count", 1)
    heads, found = _key_heads(fields, raw)
    widths = fields.by_layer("feed_forward_length", cast("int", raw["num_hidden_layers"]), least=0)
    experts = fields.number("expert_count")
    fed = "moe" if experts else "mlp"
    of_input, of_convolution, of_mlp = _biases(fields, "ssm_in", "ssm_conv1d", "ffn_up")
    found |= {
        "layers_block_type": [
            _ATTENTION if count else fed if width else "linear_attention"
            for count, width in zip(heads, widths, strict=False)
        ],
        "layer_norm_epsilon": fields.number("attention.layer_norm_rms_epsilon")
        or fields.need("attention.layer_norm_epsilon"),
        "intermediate_size": max(widths) or 1,
        "mamba_head_dim": cast("int", fields.need("ssm.inner_size")) // cast("int", raw["mamba_num_heads"]),
        "use_bias": of_input,
        "use_conv_bias": of_convolution,
        "mlp_bias": of_mlp,
    }
    if not experts:
        return found
    return found | {
        "n_routed_experts": experts,
        "num_experts_per_tok": fields.need("expert_used_count"),
        "moe_intermediate_size": fields.need("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": fields.need("expert_shared_feed_forward_length"),
        "routed_scaling_factor": fields.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": fields.flag("expert_weights_norm") or False,
        "moe_latent_size": fields.number("moe_latent_size") or None,
    }


_MIXTURE = {**EXPERTS, **EXPERT_WIDTH}
_LFM2_SHAPE = {name: key for name, key in DECODER.items() if name != "rms_norm_eps"} | {
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
}
_NEMOTRON_H = Family(
    "NemotronHForCausalLM",
    "nemotron_h",
    needed={name: key for name, key in DECODER.items() if name not in ("rms_norm_eps", "intermediate_size")}
    | {
        "head_dim": "attention.key_length",
        "mamba_num_heads": "ssm.time_step_rank",
        "n_groups": "ssm.group_count",
        "ssm_state_size": "ssm.state_size",
        "conv_kernel": "ssm.conv_kernel",
    },
    more=_nemotron_h,
)

HYBRIDS: Mapping[str, Family] = {
    "qwen35": decoder("Qwen3_5ForCausalLM", "qwen3_5_text", _delta, needed=_DELTA),
    "qwen35moe": decoder(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _delta,
        needed={**_DELTA, **_MIXTURE, **SHARED_WIDTH},
        fixed={"norm_topk_prob": True},
    ),
    "qwen3next": decoder(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        _qwen3_next,
        needed={**_DELTA, **_MIXTURE, **SHARED_WIDTH},
        fixed={"norm_topk_prob": True},
    ),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        "lfm2",
        needed=_LFM2_SHAPE,
        others=_THETA,
        fixed={"block_auto_adjust_ff_dim": False},
        more=_lfm2,
    ),
    "lfm2moe": Family(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        needed={**_LFM2_SHAPE, **_MIXTURE},
        others={
            **_THETA,
            "num_dense_layers": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
        },
        fixed={"norm_topk_prob": True},
        more=_lfm2_moe,
    ),
    "granitehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        needed={**DECODER, **_MAMBA},
        others={**ROUTED, **_THETA, **{name: key for name, key in GRANITE.items() if name not in HEADS}},
        more=_granite,
    ),
    "falcon-h1": decoder(
        "FalconH1ForCausalLM",
        "falcon_h1",
        _falcon_h1,
        needed={**_MAMBA, "mamba_d_ssm": "ssm.inner_size"},
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
}
"""The hybrids that are read, by the name that the field `general.architecture` has."""
