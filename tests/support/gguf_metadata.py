"""The metadata that llama.cpp's converter makes of a checkpoint's config.json and tokenizer.json.

Nothing of the code under test is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
from gguf_hybrids import state_fields
from gguf_latent import latent_fields
from gguf_writer import ARRAY as _ARRAY
from gguf_writer import F32, I32, Typed
from shape_files import read_shapes
from tiny import PAD_ID

Fields = dict[str, object]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BLANK = "\u2581"


@dataclass(frozen=True)
class Family:
    arch: gguf.MODEL_ARCH
    interleaved: bool = False
    """Whether the rows of q and k are interleaved, for a rotation of neighbours."""
    shifted: bool = False
    """Whether 1 is added to the weights of norms."""
    transposed: tuple[str, ...] = ()
    """Ends of the names of matrices that are stored the other way round."""
    left_out: tuple[str, ...] = ()
    first_position: int = 0
    """The rows of position embeddings ahead of the first that is used: the file leaves them out."""


_NAMES = gguf.MODEL_ARCH
FAMILIES = {
    "LlamaForCausalLM": Family(_NAMES.LLAMA, interleaved=True),
    "MistralForCausalLM": Family(_NAMES.LLAMA, interleaved=True),
    "GraniteForCausalLM": Family(_NAMES.GRANITE, interleaved=True),
    "SmolLM3ForCausalLM": Family(_NAMES.SMOLLM3, interleaved=True),
    "ArceeForCausalLM": Family(_NAMES.ARCEE, interleaved=True),
    "Ernie4_5ForCausalLM": Family(_NAMES.ERNIE4_5),
    "SeedOssForCausalLM": Family(_NAMES.SEED_OSS),
    "Qwen2ForCausalLM": Family(_NAMES.QWEN2),
    "Qwen3ForCausalLM": Family(_NAMES.QWEN3),
    "Olmo2ForCausalLM": Family(_NAMES.OLMO2),
    "Phi3ForCausalLM": Family(_NAMES.PHI3),
    "GemmaForCausalLM": Family(_NAMES.GEMMA, shifted=True),
    "Gemma2ForCausalLM": Family(_NAMES.GEMMA2, shifted=True),
    "Gemma3ForCausalLM": Family(_NAMES.GEMMA3, shifted=True),
    "Gemma3nForCausalLM": Family(_NAMES.GEMMA3N),
    "Gemma4ForCausalLM": Family(_NAMES.GEMMA4),
    "GPT2LMHeadModel": Family(
        _NAMES.GPT2, transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight"), left_out=("lm_head",)
    ),
    "MixtralForCausalLM": Family(_NAMES.LLAMA, interleaved=True),
    "Qwen2MoeForCausalLM": Family(_NAMES.QWEN2MOE),
    "Qwen3MoeForCausalLM": Family(_NAMES.QWEN3MOE),
    "Qwen3_5ForCausalLM": Family(_NAMES.QWEN35, shifted=True),
    "Qwen3_5MoeForCausalLM": Family(_NAMES.QWEN35MOE, shifted=True),
    "Qwen3NextForCausalLM": Family(_NAMES.QWEN3NEXT, shifted=True),
    "Lfm2ForCausalLM": Family(_NAMES.LFM2),
    "Lfm2MoeForCausalLM": Family(_NAMES.LFM2MOE),
    "GraniteMoeHybridForCausalLM": Family(_NAMES.GRANITE_HYBRID, interleaved=True),
    "FalconH1ForCausalLM": Family(_NAMES.FALCON_H1),
    "NemotronHForCausalLM": Family(_NAMES.NEMOTRON_H_MOE),
    "OlmoeForCausalLM": Family(_NAMES.OLMOE),
    "GraniteMoeForCausalLM": Family(_NAMES.GRANITE_MOE, interleaved=True),
    "GraniteMoeSharedForCausalLM": Family(_NAMES.GRANITE_MOE, interleaved=True),
    "GptOssForCausalLM": Family(_NAMES.GPT_OSS),
    "Glm4MoeForCausalLM": Family(_NAMES.GLM4_MOE),
    "Dots1ForCausalLM": Family(_NAMES.DOTS1),
    "Ernie4_5_MoeForCausalLM": Family(_NAMES.ERNIE4_5_MOE),
    "MiniMaxM2ForCausalLM": Family(_NAMES.MINIMAXM2),
    "DeepseekV2ForCausalLM": Family(_NAMES.DEEPSEEK2),
    "DeepseekV3ForCausalLM": Family(_NAMES.DEEPSEEK2),
    "Glm4MoeLiteForCausalLM": Family(_NAMES.DEEPSEEK2),
    "YoutuForCausalLM": Family(_NAMES.DEEPSEEK2),
    "BloomForCausalLM": Family(_NAMES.BLOOM),
    "FalconForCausalLM": Family(_NAMES.FALCON),
    "MptForCausalLM": Family(_NAMES.MPT),
    "BertModel": Family(_NAMES.BERT, left_out=("pooler",)),
    "RobertaForSequenceClassification": Family(_NAMES.BERT, first_position=PAD_ID + 1),
    "NomicBertModel": Family(_NAMES.NOMIC_BERT),
}

_KEYS: dict[str, str] = read_shapes("gguf_keys")
"""Keys of the metadata, each with the names that a field of config.json may have for it."""


def model_fields(folder: Path, *, joined: bool = False) -> Fields:
    """The fields that describe the model of a checkpoint; `joined` as older files of latent attention do."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    arch = gguf.MODEL_ARCH_NAMES[FAMILIES[config["architectures"][0]].arch]
    if arch == "nemotron_h_moe":
        if "moe" not in config["layers_block_type"]:
            arch, config = "nemotron_h", {**config, "n_routed_experts": None}
        config["num_hidden_layers"] = len(config["layers_block_type"])
    fields: Fields = {"general.architecture": arch}
    for key, names in _KEYS.items():
        value = next((config[name] for name in names.split() if config.get(name) is not None), None)
        if value is not None:
            fields[f"{arch}.{key}"] = Typed(F32, value) if isinstance(value, float) else value
    if arch in ("bloom", "mpt"):
        fields[f"{arch}.feed_forward_length"] = 4 * config.get("hidden_size", config.get("d_model"))
    if not fields.get(f"{arch}.expert_count"):
        for name in ("used_count", "group_count", "group_used_count"):
            fields.pop(f"{arch}.expert_{name}", None)
    if arch == "mpt":
        fields["mpt.attention.clamp_kqv"] = config["attn_config"]["clip_qkv"]
        fields["mpt.attention.max_alibi_bias"] = 8.0
    if arch == "falcon":
        keys = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
        fields["falcon.attention.head_count_kv"] = keys
    if arch == "qwen2":
        fields.pop("qwen2.attention.sliding_window", None)
    if arch == "gemma3":
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        fields["gemma3.attention.sliding_window_pattern"] = slides
    if arch == "gemma4":
        fields |= {f"gemma4.{key}": value for key, value in _gemma4(config).items()}
    if arch == "gemma3n":
        fields |= {f"gemma3n.{key}": value for key, value in _gemma3n(config).items()}
    if arch in ("gpt-oss", "minimax-m2"):
        fields[f"{arch}.expert_feed_forward_length"] = config["intermediate_size"]
    if arch in ("glm4moe", "dots1"):
        fields[f"{arch}.expert_weights_norm"] = config["norm_topk_prob"]
        fields[f"{arch}.block_count"] = config["num_hidden_layers"] + config.get(
            "num_nextn_predict_layers", 0
        )
    if arch in ("glm4moe", "dots1", "minimax-m2"):
        fields[f"{arch}.expert_gating_func"] = 2
    if f"{arch}.ssm.conv_kernel" in fields or arch in ("lfm2", "lfm2moe"):
        fields |= {f"{arch}.{key}": value for key, value in state_fields(arch, config).items()}
    fields |= _rope(arch, config)
    if arch == "deepseek2":
        fields.pop(f"{arch}.nextn_predict_layers", None)  # the converter leaves such layers out
        fields |= {f"{arch}.{key}": value for key, value in latent_fields(config, joined=joined).items()}
    return fields


def _gemma3n(config: Mapping[str, Any]) -> Fields:
    """What the converter writes of streams, of sparse gates and of layers that read caches of others."""
    closed = [
        NormalDist().inv_cdf(part) if part else -math.inf for part in config["activation_sparsity_pattern"]
    ]
    return {
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "feed_forward_length": Typed(_ARRAY, config["intermediate_size"], I32),
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": Typed(_ARRAY, closed, F32),
    }


def _gemma4(config: Mapping[str, Any]) -> Fields:
    """What the converter writes of layers with heads of two widths, some of which have no caches."""
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    far = config["per_layer_config"][str(slides.index(False))]
    near_heads = config["num_key_value_heads"]
    heads = [near_heads if each else far.get("num_key_value_heads", near_heads) for each in slides]
    inner, wide = config["intermediate_size"], 1 + config["use_double_wide_mlp"]
    return {
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": shared,
        "attention.key_length": far["head_dim"],
        "attention.value_length": far["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": Typed(_ARRAY, heads, I32),
        "feed_forward_length": Typed(
            _ARRAY, [inner * (wide if i >= layers - shared else 1) for i in range(layers)], I32
        ),
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.dimension_count": far["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
    } | ({"expert_used_count": config["top_k_experts"]} if config["enable_moe_block"] else {})


def _rope(arch: str, config: Mapping[str, Any]) -> Fields:
    given = config.get("rope_parameters") or {}
    rope = given.get("full_attention", given)
    fields: Fields = {}
    if theta := rope.get("rope_theta", config.get("rotary_emb_base")):
        fields[f"{arch}.rope.freq_base"] = float(theta)
    if part := rope.get("partial_rotary_factor"):
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        fields[f"{arch}.rope.dimension_count"] = int(part * width)
    if rope.get("rope_type") in ("linear", "yarn"):
        fields[f"{arch}.rope.scaling.type"] = rope["rope_type"]
        fields[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
    if original := rope.get("original_max_position_embeddings"):
        fields[f"{arch}.rope.scaling.original_context_length"] = original
    return fields


def tokenizer_fields(folder: Path, pre: str = "gpt-2") -> Fields:
    """The fields that hold the tokenizer of a checkpoint: byte-level BPE, unigrams, or word pieces."""
    made: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").exists():
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    model, added = made["model"], {one["content"]: one for one in made["added_tokens"]}
    scores: dict[str, float] = {}
    if model["type"] == "Unigram":
        ids = {token: id for id, (token, _) in enumerate(model["vocab"])}
        scores = dict(model["vocab"])
    else:
        ids = dict(model["vocab"])
    ids |= {token: one["id"] for token, one in added.items()}
    tokens = [""] * (max(ids.values()) + 1)
    kinds = [NORMAL] * len(tokens)
    for token, id in ids.items():
        tokens[id] = token
        if token in added:
            kinds[id] = CONTROL if added[token]["special"] else USER_DEFINED
    fields: Fields = {"tokenizer.ggml.pre": pre}
    match model["type"]:
        case "BPE":
            fields["tokenizer.ggml.model"] = "gpt2"
            merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
            fields["tokenizer.ggml.merges"] = merges
        case "WordPiece":
            fields["tokenizer.ggml.model"] = "bert"
            tokens = [
                token if kind == CONTROL else token[2:] if token.startswith("##") else BLANK + token
                for token, kind in zip(tokens, kinds, strict=True)
            ]
        case _:
            fields["tokenizer.ggml.model"] = "t5"
            kinds[model["unk_id"]] = UNKNOWN
            fields["tokenizer.ggml.scores"] = [float(scores.get(token, 0.0)) for token in tokens]
    fields["tokenizer.ggml.tokens"] = tokens
    fields["tokenizer.ggml.token_type"] = Typed(_ARRAY, kinds, I32)
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    names |= {"cls": "cls_token", "seperator": "sep_token", "mask": "mask_token"}
    for name, key in names.items():
        text = settings.get(key)
        text = text.get("content") if isinstance(text, dict) else text
        if text in ids:
            fields[f"tokenizer.ggml.{name}_token_id"] = ids[text]
    if template := settings.get("chat_template"):
        fields["tokenizer.chat_template"] = template
    return fields
