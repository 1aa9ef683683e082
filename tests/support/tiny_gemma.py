"""Fields of a tiny Gemma 3n: layers compute its second stream."""

GEMMA_3N: dict[str, dict[str, object]] = {
    "Gemma3nForCausalLM": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 336,
        "altup_num_inputs": 3,
        "altup_active_idx": 1,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.7, 0.0],
        "final_logit_softcapping": 2.0,
        "tie_word_embeddings": True,
    }
}
