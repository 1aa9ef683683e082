"""Every causal language model that transformers knows, made tiny: it runs as it does there, or it is refused.

Tiny configs are made by rule: sizes are replaced by the names of their fields, and a few families need more.
They cover what families do by default, or in published checkpoints, such as mixed kinds of layers.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from drive import Driver
from tiny import VOCAB_SIZE, randomise
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.config import read_config
from models.families.attention_calls import UnsupportedModel
from models.loader import LoadOptions, load_model
from models.model import CausalLM

RUNS = "runs"

_DIFFERENCES = {"HrmTextForCausalLM": 2e-2}
"""Differences of logits of more than 1e-3: transformers' own ways of attention differ by 6e-3 there."""

_LAYERS = 6
_SIZES = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len seq_length",
    64: "mamba_d_ssm",
    48: """intermediate_size n_inner ffn_dim dff dim_ff d_inner decoder_ffn_dim encoder_ffn_dim
        ffn_hidden_size feed_forward_size dense_intermediate_size intermediate_size_mlp moe_intermediate_size
        expert_ffn_hidden_size shared_expert_intermediate_size shared_experts_intermediate_size
        shared_intermediate_size moe_shared_expert_intermediate_size""",
    32: """hidden_size d_model n_embd emb_dim embedding_dim embedding_size word_embed_proj_dim lru_width
        input_embedding_size output_embedding_size dim_model_base""",
    16: """head_dim kv_channels dim_head d_head attention_head_size swa_head_dim q_lora_rank kv_lora_rank
        linear_head_dim linear_key_head_dim linear_value_head_dim state_size ssm_state_size mamba_d_state
        mamba_d_head""",
    8: "qk_nope_head_dim qk_rope_head_dim v_head_dim hidden_size_per_layer_input attention_chunk_size",
    _LAYERS: """num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers
        num_decoder_layers num_encoder_layers sliding_window attention_window_size window_size local_attention
        sliding_window_size""",
    4: """num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
        encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads
        swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts
        linear_num_heads linear_num_value_heads linear_num_key_heads mamba_n_heads rotary_dim""",
    2: """num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token
        moe_k moe_topk num_kv_shared_layers max_window_layers""",
    1: "n_group topk_group num_expert_group n_shared_experts num_shared_experts first_k_dense_replace",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_SWITCHES = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "use_sliding_window": True,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 1.0,
}
"""Fields that are set where a family has them."""


def _mixed(*kinds: str) -> list[str]:
    return list(kinds) * (_LAYERS // len(kinds))


_MORE: dict[str, dict[str, Any]] = {
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": None, "sliding_attention": None}},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "Dots3NoteForCausalLM": {"num_key_value_heads": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 3]]},
    "Gemma3nForCausalLM": {"layer_types": _mixed("sliding_attention", "full_attention")},
    "Gemma4AssistantForCausalLM": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "Gemma4ForCausalLM": {"layer_types": _mixed("sliding_attention", "full_attention")},
    "Gemma4UnifiedForCausalLM": {"layer_types": _mixed("sliding_attention", "full_attention")},
    "HeliumForCausalLM": {"head_dim": 8},
    "Lfm2ForCausalLM": {"layer_types": _mixed("conv", "full_attention")},
    "Lfm2MoeForCausalLM": {"layer_types": _mixed("conv", "full_attention")},
    "MiniMaxM3VLForCausalLM": {"layer_types": _mixed("full_attention", "minimax_m3_sparse")},
    "Mamba2ForCausalLM": {"n_groups": 1},  # older transformers knows no other norm
    "ReformerModelWithLMHead": {"axial_pos_embds": False},
    "XLNetLMHeadModel": {"d_head": 8},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {"layers_block_type": _mixed("linear_attention", "hybrid")},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""Fields that a family needs beside sizes, or has in published checkpoints but not by default."""


def names() -> list[str]:
    """The architectures, each once, though several model types may share one."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return sorted({name for known in classes for name in ([known] if isinstance(known, str) else known)})


def tiny_config(architecture: str) -> PretrainedConfig:
    config_class = getattr(transformers, architecture).config_class
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    common = {"architectures": [architecture], "dtype": "float32"}
    return config_class(**_sizes(fields) | _switches(fields) | common | _MORE.get(architecture, {}))


def _sizes(fields: dict[str, Any]) -> dict[str, Any]:
    """Replaces numbers, and fills in what is None by default, but leaves lists of a number for each layer."""
    replaceable = (name for name, value in fields.items() if isinstance(value, int | None))
    sizes = {name: _SIZE_OF[name] for name in replaceable if name in _SIZE_OF}
    if "qk_rope_head_dim" in sizes:  # latent attention: no heads share keys
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "num_key_value_heads": sizes["num_attention_heads"]}
    return sizes


def _switches(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _SWITCHES.items() if fields.get(name) is not None}


def outcome(architecture: str, folder: Path) -> str:
    """RUNS, or the sentence with which it is refused before weights are read.

    Raises if it runs and is wrong, or fails in another way.
    """
    try:
        config = tiny_config(architecture)
    except Exception as error:
        return f"no tiny config could be made of it: {' '.join(str(error).split())}"
    config.save_pretrained(folder)
    try:
        _load(folder, load_format="dummy")  # so that no model is made where the config is enough
        theirs = _make_weights(architecture, config, folder)
        ours = _load(folder)
    except UnsupportedModel as refusal:
        return str(refusal)
    _compare(ours, theirs, _DIFFERENCES.get(architecture, 1e-3))
    return RUNS


def _load(folder: Path, load_format: str = "auto") -> CausalLM:
    reported: list[float] = []
    config = read_config(folder)
    options = LoadOptions(
        config, folder, dtype=torch.float32, load_format=load_format, report=reported.append
    )
    try:
        return load_model(options)
    except UnsupportedModel:
        assert not reported, "weights were read before the model was refused"
        raise


def _make_weights(architecture: str, config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    model_class = getattr(transformers, architecture)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model, seed=0, scale=0.3)
    model.save_pretrained(folder)
    return model.eval()


def _compare(ours: CausalLM, theirs: PreTrainedModel, most: float) -> None:
    """Two texts that share steps, cut into chunks that differ, against whole texts without a cache."""
    tokens = random.Random(1)
    first, second = (tokens.choices(range(5, VOCAB_SIZE), k=23) for _ in range(2))
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([first, second]), use_cache=False).logits
    driver = Driver([ours])
    parts: dict[int, list[Tensor]] = {0: [], 3: []}
    for of_first, of_second in ((7, 5), (7, 1), (7, 7), (1, 9), (1, 1)):
        chunks = {3: second[:of_second], 0: first[:of_first]}
        first, second = first[of_first:], second[of_second:]
        for row, logits in driver.step(chunks).items():
            parts[row].append(logits)
    found = torch.stack([torch.cat(parts[0]), torch.cat(parts[3])])
    torch.testing.assert_close(found, expected, atol=most, rtol=0)
