"""Translates the metadata of mixtures and of models with latent attention into fields of config.json.

Mixtral has the architecture of Llama, and is found there. llama.cpp writes DeepSeek-V2 and V3, Kimi K2,
GLM-4.7-Flash and Youtu as one architecture, `deepseek2`: the choice of experts says which of our classes
computes a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from models.gguf.families import (
    GRANITE,
    HEADS,
    Family,
    any_decoder,
    decoder,
    rotation,
    with_scale,
)
from models.gguf.fields import Fields

SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of functions that make weights of a router's scores."""
ROUTED = {"num_experts_per_tok": "expert_used_count"}
EXPERTS = {**ROUTED, "num_experts": "expert_count"}
_LOCAL_EXPERTS = {**ROUTED, "num_local_experts": "expert_count"}
EXPERT_WIDTH = {"moe_intermediate_size": "expert_feed_forward_length"}
SHARED_WIDTH = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_GLM_EXPERTS = {**ROUTED, **EXPERT_WIDTH, "n_routed_experts": "expert_count"}
_GLM_FLASH = 154_880
"""The vocabulary of GLM-4.7-Flash, whose first files do not name that function."""
_GLM_FLASH_LAYERS = (47, 48)
_MULTIPLIER = "rope.scaling.yarn_log_multiplier"

_GLM_OTHERS = {
    **HEADS,
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


def _mixture(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """A mixture whose router's scores are made weights by softmax."""
    fields.expect("expert_gating_func", SOFTMAX)
    return any_decoder(fields, raw)


def _granite_moe(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    return with_scale(fields, _mixture(fields, raw))


def _gpt_oss(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    found = any_decoder(fields, raw)
    if isinstance(scaling := found.get("rope_scaling"), dict):
        scaling["truncate"] = False  # no metadata says so, and all of the family do it
    return found


def _sigmoid(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    fields.expect("expert_gating_func", SIGMOID)
    return any_decoder(fields, raw)


def _glm(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """GLM-4.5 and dots.llm1. Layers that look further ahead are counted among those of the model."""
    further = fields.number("nextn_predict_layers") or 0
    return _sigmoid(fields, raw) | {
        "num_hidden_layers": cast("int", raw["num_hidden_layers"]) - further,
        "num_nextn_predict_layers": further,
        "norm_topk_prob": fields.flag("expert_weights_norm") or False,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in fields.file.tensors,
    }


def _ernie_moe(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    return _mixture(fields, raw) | {"moe_num_shared_experts": fields.number("expert_shared_count") or 0}


def _deepseek(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    fields.refuse("attention.temperature_scale", "queries that grow with their position (Mistral Large 3)")
    further = fields.number("nextn_predict_layers") or 0
    layers = cast("int", raw["num_hidden_layers"]) - further
    shape = {"num_hidden_layers": layers, "num_nextn_predict_layers": further}
    return shape | _widths(fields) | _yarn(fields) | _deepseek_experts(fields, raw)


def _widths(fields: Fields) -> dict[str, object]:
    """The widths of heads. Newer files say in `key_length` what is cached, and in `key_length_mla` these."""
    keys, values = (
        cast("int", fields.number(f"attention.{name}_length_mla") or fields.need(f"attention.{name}_length"))
        for name in ("key", "value")
    )
    turned = cast("int", fields.need("rope.dimension_count"))
    if turned >= keys:
        raise fields.wrong("rope.dimension_count", f"is {turned}, which must be less than a head's {keys}")
    return {
        "qk_nope_head_dim": keys - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": values,
        "rope_interleave": True,
        "attention_bias": fields.has_bias("attn_kv_a_mqa"),
    }


def _yarn(fields: Fields) -> dict[str, object]:
    """The scaling of the rotation. YaRN's, where there is one, sharpens scores and keeps lengths.

    The file has a tenth of what config.json calls `mscale_all_dim`.
    """
    found = rotation(fields)
    scaling = found.get("rope_scaling")
    if isinstance(scaling, dict) and scaling["rope_type"] == "yarn":
        sharper = round(10 * fields.need(_MULTIPLIER), 6)
        scaling |= {"mscale": sharper, "mscale_all_dim": sharper}
    return found


def _deepseek_experts(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """The class that has this choice of experts, and the fields of it that it needs to be told."""
    if not fields.number("expert_count"):
        return {"architectures": ["YoutuForCausalLM"], "model_type": "youtu"}
    groups = fields.number("expert_group_count") or 1
    found = {
        "n_routed_experts": fields.need("expert_count"),
        "num_experts_per_tok": fields.need("expert_used_count"),
        "moe_intermediate_size": fields.need("expert_feed_forward_length"),
        "n_shared_experts": fields.number("expert_shared_count") or 0,
        "first_k_dense_replace": fields.number("leading_dense_block_count") or 0,
        "routed_scaling_factor": fields.number("expert_weights_scale") or 1.0,
        "norm_topk_prob": fields.flag("expert_weights_norm") or False,
        "n_group": groups,
        "topk_group": fields.number("expert_group_used_count") or 1,
    }
    function = fields.number("expert_gating_func") or _unnamed(raw)
    if function == SIGMOID:
        return found | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    if function != SOFTMAX:
        raise fields.wrong(
            "expert_gating_func",
            f"is {function}, but only {SOFTMAX} (softmax) and {SIGMOID} (sigmoid) are read: use the model's "
            "own checkpoint",
        )
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return found | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": method,
    }


def _unnamed(raw: Mapping[str, object]) -> int:
    """The function of a file that names none, as llama.cpp takes it."""
    is_glm = raw["vocab_size"] == _GLM_FLASH and raw["num_hidden_layers"] in _GLM_FLASH_LAYERS
    return SIGMOID if is_glm else SOFTMAX


WITH_EXPERTS: Mapping[str, Family] = {
    "qwen2moe": decoder(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _mixture,
        needed={
            **EXPERTS,
            **EXPERT_WIDTH,
            **SHARED_WIDTH,
        },
        fixed={"norm_topk_prob": False},
    ),
    "qwen3moe": decoder(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _mixture,
        needed={**EXPERTS, **EXPERT_WIDTH},
        fixed={"norm_topk_prob": True},
    ),
    "olmoe": decoder(
        "OlmoeForCausalLM",
        "olmoe",
        _mixture,
        needed=EXPERTS,
        others={**HEADS, "clip_qkv": "attention.clamp_kqv"},
        fixed={"norm_topk_prob": False},
    ),
    "granitemoe": decoder(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        _granite_moe,
        needed=_LOCAL_EXPERTS,
        others={**GRANITE, "shared_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "gpt-oss": decoder(
        "GptOssForCausalLM",
        "gpt_oss",
        _gpt_oss,
        needed={**_LOCAL_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
        others={**HEADS, "sliding_window": "attention.sliding_window"},
    ),
    "glm4moe": decoder("Glm4MoeForCausalLM", "glm4_moe", _glm, needed=_GLM_EXPERTS, others=_GLM_OTHERS),
    "dots1": decoder(
        "Dots1ForCausalLM",
        "dots1",
        _glm,
        needed=_GLM_EXPERTS,
        others=_GLM_OTHERS,
        fixed={"sliding_window": None},
    ),
    "ernie4_5-moe": decoder(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        _ernie_moe,
        needed={**EXPERT_WIDTH, "moe_num_experts": "expert_count", "moe_k": "expert_used_count"},
        others={
            **HEADS,
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
    "minimax-m2": decoder(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        _sigmoid,
        needed={**_LOCAL_EXPERTS, "intermediate_size": "expert_feed_forward_length"},
    ),
    "deepseek2": decoder(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        _deepseek,
        needed={"kv_lora_rank": "attention.kv_lora_rank"},
        others={"q_lora_rank": "attention.q_lora_rank", "rope_theta": "rope.freq_base"},
    ),
}
"""The architectures that may have experts, by the name that the field `general.architecture` has."""
