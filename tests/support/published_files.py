"""The config.json and the sentence-transformers files of well-known checkpoints, with sizes made small."""

from pooling_files import ST
from tiny import VOCAB_SIZE

OLDER_FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
FLAGS = (*OLDER_FLAGS, "weightedmean_tokens", "lasttoken")
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 3,
    "eos_token_id": 3,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 32768,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}
GEMMA = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "dtype": "float32",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 2048,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
    "vocab_size": VOCAB_SIZE,
}
BERT = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
MODERNBERT = {
    "architectures": ["ModernBertModel"],
    "attention_bias": False,
    "bos_token_id": 1,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "cls_token_id": 1,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "eos_token_id": 2,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "pad_token_id": 3,
    "position_embedding_type": "absolute",
    "reference_compile": None,
    "sep_token_id": 2,
    "torch_dtype": "float16",
    "vocab_size": VOCAB_SIZE,
}
NOMIC = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 48,
    "n_layer": 2,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "torch_dtype": "float32",
    "type_vocab_size": 2,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "vocab_size": VOCAB_SIZE,
}
XLM_ROBERTA = BERT | {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}


def modules(*kinds: str) -> list[dict[str, object]]:
    paths = ["" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    return [
        {"idx": index, "name": str(index), "path": path, "type": f"{ST}.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]


def pooling(flag: str, flags: tuple[str, ...] = FLAGS, **more: object) -> dict[str, object]:
    modes = {f"pooling_mode_{name}": name == flag for name in flags}
    return {"word_embedding_dimension": 32, **modes, **more}


def sentence(length: int, *, lower_case: bool = False) -> dict[str, object]:
    return {"max_seq_length": length, "do_lower_case": lower_case}


def dense(inputs: int, outputs: int) -> dict[str, object]:
    identity = "torch.nn.modules.linear.Identity"
    return {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": identity}
