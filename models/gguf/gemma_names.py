"""GGUF's names of the tensors of Gemma 3n and Gemma 4 that other decoders do not have."""

from __future__ import annotations

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
EXPERTS = {
    "ffn_gate_exps": ("experts.{}.gate_proj",),
    "ffn_up_exps": ("experts.{}.up_proj",),
    "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
    "ffn_down_exps": ("experts.{}.down_proj",),
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
