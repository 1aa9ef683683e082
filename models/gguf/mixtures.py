"""What the metadata of mixtures of experts means in the words of config.json.

Mixtral has the architecture of Llama, and is found there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from models.gguf.families import DECODER, GRANITE, HEADS, Family, any_decoder, with_scale
from models.gguf.fields import Fields

_ROUTED = {"num_experts_per_tok": "expert_used_count"}
SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of functions that make weights of a router's scores."""
_GLM_EXPERTS = {
    **DECODER,
    **_ROUTED,
    "n_routed_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
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


MIXTURES: Mapping[str, Family] = {
    "qwen2moe": Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        needed={
            **DECODER,
            **_ROUTED,
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        others=HEADS,
        fixed={"norm_topk_prob": False},
        more=_mixture,
    ),
    "qwen3moe": Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        needed={
            **DECODER,
            **_ROUTED,
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        others=HEADS,
        fixed={"norm_topk_prob": True},
        more=_mixture,
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        needed={**DECODER, **_ROUTED, "num_experts": "expert_count"},
        others={**HEADS, "clip_qkv": "attention.clamp_kqv"},
        fixed={"norm_topk_prob": False},
        more=_mixture,
    ),
    "granitemoe": Family(
        architecture="GraniteMoeSharedForCausalLM",
        model_type="granitemoeshared",
        needed={**DECODER, **_ROUTED, "num_local_experts": "expert_count"},
        others={**GRANITE, "shared_intermediate_size": "expert_shared_feed_forward_length"},
        more=_granite_moe,
    ),
    "gpt-oss": Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        needed={
            **DECODER,
            **_ROUTED,
            "intermediate_size": "expert_feed_forward_length",
            "num_local_experts": "expert_count",
        },
        others={**HEADS, "sliding_window": "attention.sliding_window"},
        more=_gpt_oss,
    ),
    "glm4moe": Family(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        needed=_GLM_EXPERTS,
        others=_GLM_OTHERS,
        more=_glm,
    ),
    "dots1": Family(
        architecture="Dots1ForCausalLM",
        model_type="dots1",
        needed=_GLM_EXPERTS,
        others=_GLM_OTHERS,
        fixed={"sliding_window": None},
        more=_glm,
    ),
    "ernie4_5-moe": Family(
        architecture="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        needed={
            **DECODER,
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        others={
            **HEADS,
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
        more=_ernie_moe,
    ),
    "minimax-m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        needed={
            **DECODER,
            **_ROUTED,
            "intermediate_size": "expert_feed_forward_length",
            "num_local_experts": "expert_count",
        },
        others=HEADS,
        more=_sigmoid,
    ),
}
"""The architectures with experts that are read, by the name that the field `general.architecture` has."""
