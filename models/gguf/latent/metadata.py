"""What the metadata of models with latent attention means in the words of config.json.

llama.cpp writes DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash and Youtu as one architecture, `deepseek2`: the
choice of experts says which of our classes computes a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from models.gguf.families import DECODER, Family, rotation
from models.gguf.fields import Fields
from models.gguf.mixtures import SIGMOID, SOFTMAX

_GLM_FLASH = 154_880
"""The vocabulary of GLM-4.7-Flash, whose first files do not name that function."""
_GLM_FLASH_LAYERS = (47, 48)
_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def _deepseek(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    fields.refuse("attention.temperature_scale", "queries that grow with their position (Mistral Large 3)")
    further = fields.number("nextn_predict_layers") or 0
    layers = cast("int", raw["num_hidden_layers"]) - further
    shape = {"num_hidden_layers": layers, "num_nextn_predict_layers": further}
    return shape | _widths(fields) | _yarn(fields) | _experts(fields, raw)


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


def _experts(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
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


LATENT: Mapping[str, Family] = {
    "deepseek2": Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        needed={**DECODER, "kv_lora_rank": "attention.kv_lora_rank"},
        others={"q_lora_rank": "attention.q_lora_rank", "rope_theta": "rope.freq_base"},
        more=_deepseek,
    ),
}
"""The architectures with latent attention, by the name that the field `general.architecture` has."""
