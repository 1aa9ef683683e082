"""Gemma 3n and Gemma 4 in GGUF files: names of their tensors, and the fields of config.json by layers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from statistics import NormalDist
from typing import cast

from models.gguf.families import DECODER, HEADS, Family
from models.gguf.fields import Fields

MODULES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
PARTS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
TENSORS = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "altup_correct_scale.weight": "altup.correct_output_scale",
}
STACKS = {
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}


_SHARED = {
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "sliding_window": "attention.sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
}
_NEEDED = {name: key for name, key in DECODER.items() if name != "intermediate_size"}
"""What all have; their MLPs may differ by layer."""


def _slides(fields: Fields, layers: int) -> list[bool]:
    """Whether each of so many layers has a window."""
    slides = fields.get("attention.sliding_window_pattern")
    if not isinstance(slides, array | list) or len(slides) != layers:
        raise fields.wrong(
            "attention.sliding_window_pattern", f"must have a flag for each of {layers} layers"
        )
    return [bool(flag) for flag in slides]


def _kinds(slides: list[bool]) -> list[str]:
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _gemma3n(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """Gemma 3n, of which the file says how many deviations above the mean gates are closed."""
    layers = cast("int", raw["num_hidden_layers"])
    found: dict[str, object] = {
        "intermediate_size": fields.by_layer("feed_forward_length", layers),
        "layer_types": _kinds(_slides(fields, layers)),
        "rope_local_base_freq": fields.number("rope.freq_base_swa") or 10_000.0,
        "laurel_rank": fields.rows("blk.0.laurel_l.weight"),
        "vocab_size_per_layer_input": fields.rows("per_layer_token_embd.weight"),
    }
    deviations = fields.get("activation_sparsity_scale")
    if isinstance(deviations, array):
        found["activation_sparsity_pattern"] = [NormalDist().cdf(each) for each in deviations]
    return found


def _gemma4(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """Gemma 4, whose layers have heads of two widths, and MLPs of two if late layers share caches."""
    layers, shared = cast("int", raw["num_hidden_layers"]), cast("int", raw.get("num_kv_shared_layers", 0))
    slides = _slides(fields, layers)
    widths = fields.by_layer("feed_forward_length", layers)
    heads = fields.by_layer("attention.head_count_kv", layers)
    owners, inner, wide = layers - shared, widths[0], widths[-1]
    if widths != [inner] * owners + [wide] * shared or wide not in (inner, 2 * inner):
        raise fields.wrong(
            "feed_forward_length",
            f"must be one width, or be doubled in the last {shared} layers (attention.shared_kv_layers)",
        )
    full = [layer for layer in range(layers) if not slides[layer]]
    far = {"head_dim": fields.need("attention.key_length")}
    turned = fields.factors("rope_freqs.weight") or [1.0]
    tensors = fields.file.tensors
    return {
        "intermediate_size": inner,
        "use_double_wide_mlp": wide != inner,
        "head_dim": fields.need("attention.key_length_swa"),
        "num_key_value_heads": next((heads[i] for i in range(layers) if slides[i]), heads[0]),
        "layer_types": _kinds(slides),
        "per_layer_config": {str(layer): {**far, "num_key_value_heads": heads[layer]} for layer in full},
        "attention_k_eq_v": not all(
            f"blk.{layer}.attn_v.weight" in tensors for layer in full if layer < owners
        ),
        "enable_moe_block": bool(raw.get("num_experts")),
        "vocab_size_per_layer_input": fields.rows(
            "per_layer_token_embd.weight" if raw.get("hidden_size_per_layer_input") else "token_embd.weight"
        ),
        "rope_parameters": {
            "sliding_attention": {"rope_theta": fields.number("rope.freq_base_swa") or 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": fields.need("rope.freq_base"),
                "partial_rotary_factor": turned.count(1.0) / len(turned),
            },
        },
    }


GEMMAS: Mapping[str, Family] = {
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        needed=_NEEDED,
        others={
            **HEADS,
            **_SHARED,
            "altup_num_inputs": "altup.num_inputs",
            "altup_active_idx": "altup.active_idx",
        },
        more=_gemma3n,
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        needed=_NEEDED,
        others={
            **_SHARED,
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        more=_gemma4,
    ),
}
"""Architectures by the name that the field `general.architecture` has."""
