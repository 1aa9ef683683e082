"""Tiny random checkpoints of real architectures, and Hugging Face's own classes as the oracle for them.

A checkpoint is a whole one (config, weights, tokenizer, chat template, generation config), always the same
for the same arguments, and made so that a mistake shows: norms are not the identity, biases are not zero,
query heads share key heads, windows are shorter than a prompt, soft-caps bite.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn

BOS, EOS, PAD, TURN, TURN_END = SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, PAD_ID, TURN_ID, TURN_END_ID = range(len(SPECIALS))
VOCAB_SIZE = 320

_TEXT = """\
The quick brown fox jumps over the lazy dog, and then the dog thinks about the fox.
There is nothing in the room but the chair, the table and the thing on the table.
She said that there were three of them, and that they would be there in the morning.
What is the answer to the question? The answer is that there is no other question.
system user assistant You are a helpful assistant. Hello, hello! How are you?
import this, then return that: for each one in the other, there is another one.
"""

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)

# What nearly all families share; the entries of _FAMILIES add to it, or replace it where names differ.
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
_HYBRID_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
_FAMILIES: dict[str, dict[str, object]] = {
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
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": 48},
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
    "Qwen3_5ForCausalLM": {**_HYBRID, "linear_num_value_heads": 8},
    "Qwen3_5MoeForCausalLM": {**_HYBRID, **_HYBRID_EXPERTS},
    "Qwen3NextForCausalLM": {**_HYBRID, **_HYBRID_EXPERTS, "linear_num_value_heads": 8},
    # Families that we do not write ourselves: they run on transformers' own code.
    "GPTNeoXForCausalLM": {**_SHAPE, "rotary_pct": 0.5},  # its code does not read num_key_value_heads
    "JetMoeForCausalLM": {**_SHAPE, "kv_channels": 16, "num_local_experts": 4},  # repeats its keys
    "CohereForCausalLM": {**_SHAPE, "logit_scale": 1.0, "use_qk_norm": True, "tie_word_embeddings": True},
    "Starcoder2ForCausalLM": {**_SHAPE, "sliding_window": _WINDOW, "tie_word_embeddings": True},
}

ARCHITECTURES = tuple(_FAMILIES)

_ENCODER_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_NARROW = {**_ENCODER_SHAPE, "embedding_size": 16}
_ENCODERS: dict[str, dict[str, object]] = {
    "Bert": _ENCODER_SHAPE,
    "Roberta": {**_ENCODER_SHAPE, "type_vocab_size": 1},
    "XLMRoberta": {**_ENCODER_SHAPE, "type_vocab_size": 1},
    "Camembert": {**_ENCODER_SHAPE, "type_vocab_size": 1},
    "Electra": _NARROW,
    "Albert": {**_NARROW, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
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
    "Gte": {**_ENCODER_SHAPE, "type_vocab_size": 2},
}
"""Fields of encoders, by the beginning of their architectures' names."""
ENCODERS = tuple(_ENCODERS)


def tiny_checkpoint(arch: str, folder: Path, **overrides: object) -> Path:
    """Write a checkpoint of `arch` into `folder` and return it. `overrides` are fields of its config.json."""
    config = tiny_config(arch, **overrides)
    model = getattr(transformers, arch)(config)
    # With larger ones the norms behind each layer of an encoder would leave nothing of what tokens differ in.
    randomise(model, seed=0, scale=0.3 if arch in _FAMILIES else 0.15)
    model.to(config.dtype).save_pretrained(folder)
    write_tokenizer(folder)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, TURN_END_ID], "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def tiny_config(arch: str, **overrides: object) -> Any:
    """The config of such a checkpoint, which is all that kernels are compiled by."""
    return getattr(transformers, arch).config_class(
        **{
            **shape_of(arch),
            "vocab_size": VOCAB_SIZE,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "dtype": "float32",
            "architectures": [arch],
            **overrides,
        }
    )


def shape_of(arch: str) -> dict[str, object]:
    """The fields of the tiny config of an architecture."""
    if arch in _FAMILIES:
        return _FAMILIES[arch]
    return _ENCODERS[re.sub("(Model|For[A-Z].*)$", "", arch)]


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [TURN, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


@cache
def _tokenizer_json() -> str:
    """Byte-level BPE that knows all 256 bytes, so any text comes back as it went in. Starts with BOS."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer.to_str()


@torch.no_grad()
def randomise(model: nn.Module, seed: int, scale: float) -> None:
    """Weights large enough to matter. Norms and biases keep their initial 0 or 1 as the mean.

    Embeddings stay small: where the head is tied to them, a token would otherwise mostly predict itself.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("sinks", "e_score_correction_bias")):
            parameter.copy_(noise if name.endswith("sinks") else 0.2 * noise)
        elif name.endswith("conv1d.weight"):
            parameter.copy_(noise)
        elif name.endswith("A_log"):
            parameter.copy_(noise - 1)  # some heads forget soon, others late
        elif parameter.dim() == 1:
            drawn = parameter.min() != parameter.max()  # by transformers, and otherwise in each process
            parameter.copy_(0.1 * noise if drawn else parameter + 0.1 * noise)
        else:
            parameter.copy_((0.1 if parameter in embeddings else scale) * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


_IN_NO_TABLE = ("Mistral4ForCausalLM",)
"""Causal language models that `AutoModelForCausalLM` does not know."""


@cache
def hf_model(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Hugging Face's model with its plainest attention, which knows soft-caps and windows."""
    architecture = json.loads((folder / "config.json").read_text()).get("architectures", [""])[0]
    made = getattr(transformers, architecture if architecture in _IN_NO_TABLE else "AutoModelForCausalLM")
    model = made.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def hf_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, V] float32, computed in this type: what follows after each of the tokens."""
    return hf_model(folder, dtype)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.inference_mode()
def hf_greedy(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The `max_tokens` most likely tokens after each prompt, end-of-sequence tokens not minded."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(max_tokens):
        filled = torch.tensor([*zip_longest(*rows, fillvalue=0)]).T  # no token sees those after it
        for row, found in zip(rows, hf_model(folder)(input_ids=filled, use_cache=False).logits, strict=True):
            row.append(int(found[len(row) - 1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
