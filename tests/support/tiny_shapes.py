"""Fields of tiny configs, by architecture: windows are shorter than a prompt, query heads share key heads."""

from hybrid_shapes import EXPERTS, HYBRIDS

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


SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, PAD_ID, TURN_ID, TURN_END_ID = range(len(SPECIALS))

# What nearly all families share; the entries of FAMILIES add to it, or replace it where names differ.
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_WINDOW = 6
GROWING_QUERIES = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
"""The rope parameters of a tiny Ministral 3, whose queries grow every four tokens."""
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48}
_LATENT = {
    **_SHAPE,
    "num_key_value_heads": 4,  # which means nothing
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_SHARED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_GROUPED = {**_LATENT, **_SHARED_EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
# With fewer heads the scores of many tokens would be 0, between which transformers chooses in no order.
_INDEXED = {**_GROUPED, "index_topk": 6, "index_head_dim": 12, "index_n_heads": 8}
_TWO_WIDTHS: dict[str, object] = {
    **_SHAPE,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_hidden_layers": 4,
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
    "tie_word_embeddings": True,
}
SHARED_CACHES: dict[str, object] = {
    "attention_k_eq_v": False,
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2
    + ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
}
"""What small Gemma 4 models have: late layers that read caches of others, and vectors for layers."""
EXPERTS_BESIDE: dict[str, object] = {**EXPERTS, "enable_moe_block": True, "top_k_experts": 3}
"""What a Gemma 4 with experts beside its MLPs has."""
FAMILIES: dict[str, dict[str, object]] = GEMMA_3N | {
    "LlamaForCausalLM": _SHAPE,
    "MistralForCausalLM": {**_SHAPE, "head_dim": 16, "sliding_window": _WINDOW},
    "Ministral3ForCausalLM": {**_SHAPE, "head_dim": 16, "rope_parameters": GROWING_QUERIES},
    "Qwen2ForCausalLM": {
        **_SHAPE,
        "use_sliding_window": True,
        "sliding_window": _WINDOW,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "Qwen3ForCausalLM": {**_SHAPE, "head_dim": 16, "tie_word_embeddings": True},
    "Phi3ForCausalLM": {**_SHAPE, "sliding_window": _WINDOW},
    "GemmaForCausalLM": {**_SHAPE, "head_dim": 16, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": {
        **_SHAPE,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": _WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.0,
        "tie_word_embeddings": True,
    },
    "Gemma3ForCausalLM": {
        **_SHAPE,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "num_hidden_layers": 4,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        },
        "tie_word_embeddings": True,
    },
    "Gemma4ForCausalLM": _TWO_WIDTHS,
    "Gemma4UnifiedForCausalLM": {**_TWO_WIDTHS, "attention_k_eq_v": False},
    "Olmo2ForCausalLM": _SHAPE,
    "GraniteForCausalLM": {
        **_SHAPE,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
        "tie_word_embeddings": True,
    },
    "SmolLM3ForCausalLM": {
        **_SHAPE,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "tie_word_embeddings": True,
    },
    "Olmo3ForCausalLM": {
        **_SHAPE,
        "num_hidden_layers": 4,
        "sliding_window": _WINDOW,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "attention_factor": 1.2,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "Exaone4ForCausalLM": {**_SHAPE, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": _WINDOW},
    "SeedOssForCausalLM": {**_SHAPE, "head_dim": 16},
    "ArceeForCausalLM": _SHAPE,
    "HeliumForCausalLM": {**_SHAPE, "head_dim": 8},
    "GlmForCausalLM": {**_SHAPE, "head_dim": 16, "num_key_value_heads": 1},
    "Glm4ForCausalLM": {**_SHAPE, "head_dim": 16},
    "Ernie4_5ForCausalLM": {**_SHAPE, "head_dim": 16, "tie_word_embeddings": True},
    "HunYuanDenseV1ForCausalLM": {
        **_SHAPE,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
        "tie_word_embeddings": True,
    },
    "ApertusForCausalLM": _SHAPE,
    "CohereForCausalLM": {**_SHAPE, "logit_scale": 1.0, "use_qk_norm": True, "tie_word_embeddings": True},
    "Cohere2ForCausalLM": {
        **_SHAPE,
        "num_hidden_layers": 4,
        "logit_scale": 0.7,
        "sliding_window": _WINDOW,
        "tie_word_embeddings": True,
    },
    "StableLmForCausalLM": {**_SHAPE, "partial_rotary_factor": 0.5},
    "OlmoForCausalLM": {**_SHAPE, "clip_qkv": 0.7},
    "Starcoder2ForCausalLM": {**_SHAPE, "sliding_window": _WINDOW, "tie_word_embeddings": True},
    "NemotronForCausalLM": {**_SHAPE, "head_dim": 16},
    "PhiForCausalLM": _SHAPE,
    "GPTNeoXForCausalLM": {**_SHAPE, "num_key_value_heads": 4, "rotary_pct": 0.5},
    "GPTJForCausalLM": {**_GPT, "n_positions": 512, "rotary_dim": 4},
    "FalconForCausalLM": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "ffn_hidden_size": 48,
    },
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "seq_length": 512},
    "MptForCausalLM": {
        "d_model": 32,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 512,
        "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3},
    },
    "GPTBigCodeForCausalLM": {**_GPT, "n_positions": 512},
    "GPT2LMHeadModel": {**_GPT, "n_positions": 512},
    "OPTForCausalLM": {
        "hidden_size": 32,
        "word_embed_proj_dim": 16,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    },
    "MixtralForCausalLM": {**_SHAPE, "num_local_experts": 5, "sliding_window": _WINDOW},
    "Qwen2MoeForCausalLM": {
        **_SHAPE,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "Qwen3MoeForCausalLM": {
        **_SHAPE,
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "OlmoeForCausalLM": {**_SHAPE, "num_experts": 6, "num_experts_per_tok": 4},
    "GraniteMoeForCausalLM": {
        **_SHAPE,
        "num_local_experts": 5,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
        "tie_word_embeddings": True,
    },
    "GraniteMoeSharedForCausalLM": {**_SHAPE, "num_local_experts": 5, "shared_intermediate_size": 40},
    "Glm4MoeForCausalLM": {
        **_SHAPE,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "Dots1ForCausalLM": {
        **_SHAPE,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "Ernie4_5_MoeForCausalLM": {
        **_SHAPE,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
        "tie_word_embeddings": True,
    },
    "MiniMaxM2ForCausalLM": {
        **_SHAPE,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "GptOssForCausalLM": {
        **_SHAPE,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "DeepseekV2ForCausalLM": {**_GROUPED, "topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": _GROUPED,
    "DeepseekV32ForCausalLM": _INDEXED,
    "GlmMoeDsaForCausalLM": {**_INDEXED, "indexer_types": ["full", "shared", "full"]},
    "Glm4MoeLiteForCausalLM": {**_LATENT, **_SHARED_EXPERTS, "n_shared_experts": 1, "v_head_dim": 20},
    "YoutuForCausalLM": _LATENT,
    "Mistral4ForCausalLM": {**_GROUPED, "rope_parameters": {**GROWING_QUERIES, "partial_rotary_factor": 0.4}},
    "MiniCPM3ForCausalLM": {
        **_LATENT,
        "v_head_dim": None,
        "scale_emb": 3.0,
        "scale_depth": 1.2,
        "dim_model_base": 16,
    },
    **HYBRIDS,
    "Jais2ForCausalLM": _SHAPE,  # this and the next run on transformers' code
    "JetMoeForCausalLM": {**_SHAPE, "kv_channels": 16, "num_local_experts": 4},  # repeats its keys
}

_ENCODER_SHAPE: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_NARROW: dict[str, object] = {**_ENCODER_SHAPE, "embedding_size": 16}
ENCODER_SHAPES: dict[str, dict[str, object]] = {
    "Bert": _ENCODER_SHAPE,
    "Roberta": {**_ENCODER_SHAPE, "type_vocab_size": 1},
    "XLMRoberta": {**_ENCODER_SHAPE, "type_vocab_size": 1},
    "Camembert": {**_ENCODER_SHAPE, "type_vocab_size": 1},
    "Electra": _NARROW,
    "Albert": {**_NARROW, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
    "DebertaV2": {
        **_ENCODER_SHAPE,
        "relative_attention": True,
        "position_buckets": 8,
        "max_relative_positions": 20,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "DistilBert": {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
    "MPNet": _ENCODER_SHAPE,
    "ModernBert": {
        **_ENCODER_SHAPE,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "local_attention": 2 * _WINDOW,
        "cls_token_id": BOS_ID,
        "sep_token_id": EOS_ID,
    },
    "NomicBert": _ENCODER_SHAPE,
    "JinaEmbeddingsV3": {**_ENCODER_SHAPE, "type_vocab_size": 1},
    "Gte": {**_ENCODER_SHAPE, "type_vocab_size": 2},
}
"""Fields of encoders, by the beginning of their architectures' names."""
