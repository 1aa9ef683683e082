"""Fields of tiny configs of hybrids, and of models without attention, by architecture."""

from __future__ import annotations

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_HYBRID = {
    **_SHAPE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 1e-3,  # else the norm of a head that its state hardly answers magnifies rounding errors
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
_SHORT_CONVOLUTIONS = {
    **_SHAPE,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
_MAMBA = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "rms_norm_eps": 1e-3,
}
_ALONE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "state_size": 24,
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": False,
}
"""What models have whose layers are scans alone."""
HYBRIDS: dict[str, dict[str, object]] = {
    "Qwen3_5ForCausalLM": {**_HYBRID, "linear_num_value_heads": 8},
    "Qwen3_5MoeForCausalLM": {**_HYBRID, **EXPERTS},
    "Qwen3NextForCausalLM": {**_HYBRID, **EXPERTS, "linear_num_value_heads": 8},
    "Lfm2ForCausalLM": {**_SHORT_CONVOLUTIONS, "block_multiple_of": 8, "tie_word_embeddings": True},
    "Lfm2MoeForCausalLM": {
        **_SHORT_CONVOLUTIONS,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.7,
    },
    "BambaForCausalLM": {**_SHAPE, **_MAMBA, "attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {
        **_SHAPE,
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_local_experts": 5,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    },
    "FalconH1ForCausalLM": {
        **_SHAPE,
        **_MAMBA,
        "mamba_d_ssm": 64,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 1.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 0.4,
        "ssm_multipliers": [0.6, 1.3, 0.7, 1.4, 0.9],
        "mlp_multipliers": [0.8, 0.5],
    },
    "NemotronHForCausalLM": {
        **{name: value for name, value in _SHAPE.items() if name != "num_hidden_layers"},
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 4,
        "ssm_state_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 2.5,
        "layer_norm_epsilon": 1e-3,
    },
    "Mamba2ForCausalLM": {
        **_ALONE,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,  # of more, older transformers computes one norm
    },
    "MambaForCausalLM": {**_ALONE, "time_step_rank": 6},
    "FalconMambaForCausalLM": {**_ALONE, "time_step_rank": 6},
    "JambaForCausalLM": {
        **_SHAPE,
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "num_experts": 5,
        "mamba_d_state": 24,
        "mamba_dt_rank": 6,
        "rms_norm_eps": 1e-3,
    },
    "KimiLinearForCausalLM": {
        **_SHAPE,
        "num_key_value_heads": 4,  # which means nothing
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_num_heads": 4,
        "linear_head_dim": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rms_norm_eps": 1e-3,
    },
    "OlmoHybridForCausalLM": {
        **{name: value for name, value in _HYBRID.items() if name != "head_dim"},
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
