"""Translates the metadata of a GGUF file into fields of config.json: tables, and functions where tables end.

`general.architecture` is llama.cpp's word for a family, and the prefix of the fields that describe the model.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import cast

from models.gguf.fields import Fields
from models.plain_files import FileError

More = Callable[[Fields, Mapping[str, object]], dict[str, object]]


def _nothing_more(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    return {}


_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Family:
    """The class that serves an architecture, and its fields of config.json by the keys of the metadata."""

    architecture: str
    model_type: str
    _: KW_ONLY
    needed: Mapping[str, str]
    others: Mapping[str, str] = field(default_factory=dict[str, str])
    fixed: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields that every model of the family has."""
    more: More = _nothing_more
    """A function that finds what takes more than a look-up, from the fields that were found before."""


_SHAPE = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
DECODER = {**_SHAPE, "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
HEADS = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
_ENCODER = {**_SHAPE, "layer_norm_eps": "attention.layer_norm_epsilon"}
_BLOOM = {name: key for name, key in _SHAPE.items() if name != "intermediate_size"} | {
    "layer_norm_epsilon": "attention.layer_norm_epsilon"
}


def _decoder(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """A decoder without experts."""
    fields.refuse("expert_count", "experts")
    return any_decoder(fields, raw)


def any_decoder(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """What all decoders have in common: rotation, biases, and nothing that the family does not know."""
    head_dim = cast("int", raw.get("head_dim")) or int(
        fields.need("embedding_length") // fields.need("attention.head_count")
    )
    if (value := fields.number("attention.value_length")) not in (None, head_dim):
        raise fields.wrong(
            "attention.value_length", f"is {value}, but keys have {head_dim}, and both must be of one width"
        )
    found: dict[str, object] = {"head_dim": head_dim, **rotation(fields)}
    if (turned := fields.number("rope.dimension_count")) not in (None, head_dim):
        found["partial_rotary_factor"] = cast("float", turned) / head_dim
    if fields.has_bias("attn_q"):
        found["attention_bias"] = True
    if fields.has_bias("ffn_up"):
        found["mlp_bias"] = True
    return found


def rotation(fields: Fields) -> dict[str, object]:
    """The scaling of the rotation. Llama 3's is a tensor of factors, one for each pair of dimensions."""
    original = fields.number("rope.scaling.original_context_length")
    if (factors := fields.factors("rope_freqs.weight")) is not None:
        long, short, scale = factors, factors, 1.0
    else:
        long, short = fields.factors("rope_factors_long.weight"), fields.factors("rope_factors_short.weight")
        scale = fields.number("rope.scaling.attn_factor")
    if long is not None and short is not None:
        scaling: dict[str, object] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        if scale is not None:
            scaling["attention_factor"] = scale
    else:
        kind, factor = fields.get("rope.scaling.type"), "rope.scaling.factor"
        if fields.number(factor) is None and fields.number("rope.scale_linear"):
            factor = "rope.scale_linear"  # its name in files of 2023
        if kind is None and fields.number(factor):
            kind = "linear"
        if kind in (None, "none", "longrope"):
            return {}
        if kind not in ("linear", "yarn"):
            raise fields.wrong(
                "rope.scaling.type",
                f"is {kind!r}, but only none, linear, yarn and longrope are read",
            )
        scaling = {"rope_type": kind, "factor": fields.need(factor)}
        for name in ("beta_fast", "beta_slow") if kind == "yarn" else ():
            if (value := fields.number(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = value
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _llama(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """Llama, Mistral if all layers have a window, or Mixtral if there are experts."""
    window = fields.number("attention.sliding_window")
    if experts := fields.number("expert_count"):
        chosen = fields.need("expert_used_count")
        mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": window}
        counts = {"num_local_experts": experts, "num_experts_per_tok": chosen}
        return any_decoder(fields, raw) | mixtral | counts
    if not window:
        return _decoder(fields, raw)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return _decoder(fields, raw) | mistral


def _phi3(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    # A window of 0 is how the converter writes that there is none.
    return _decoder(fields, raw) | {"sliding_window": fields.number("attention.sliding_window") or None}


def _granite(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    return with_scale(fields, _decoder(fields, raw))


def with_scale(fields: Fields, found: dict[str, object]) -> dict[str, object]:
    """Add the factor of Granite's scores to what was found."""
    scale = fields.number("attention.scale")
    return found | {"attention_multiplier": scale or cast("int", found["head_dim"]) ** -0.5}


def _olmo2(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    fields.refuse("attention.sliding_window", "windows (OLMo 3)")
    return _decoder(fields, raw)


def _gemma(fields: Fields, raw: Mapping[str, object], *, largest: int, period: int) -> dict[str, object]:
    """Gemma 2 and 3, of which the models of 27B, with `largest` layers, divide by another root.

    Every `period` layers one has no window.
    """
    found = _decoder(fields, raw)
    heads = cast("int", raw["num_attention_heads"])
    width = cast("int", raw["hidden_size"]) // heads
    layers = cast("int", raw["num_hidden_layers"])
    scale = fields.number("attention.scale")
    divisor = width if layers == largest else found["head_dim"]
    found["query_pre_attn_scalar"] = scale**-2 if scale else divisor
    window = fields.number("attention.sliding_window")
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, array):
        slides = [bool(flag) for flag in pattern]
    else:
        every = pattern if isinstance(pattern, int) and pattern > 0 else period
        slides = [bool(window) and (layer + 1) % every != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return found | {"sliding_window": window or None, "layer_types": kinds}


def _gemma2(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    return _gemma(fields, raw, largest=46, period=2)


def _gemma3(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    near = fields.number("rope.freq_base_swa") or 10000.0
    return _gemma(fields, raw, largest=62, period=6) | {"rope_local_base_freq": near}


def _falcon(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """Falcon with rotation: 7B, whose only key head all share, and the later ones."""
    shared = raw.get("num_kv_heads", 1) == 1
    return {
        "multi_query": shared,
        "new_decoder_architecture": not shared,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in fields.file.tensors else 1,
        "bias": fields.has_bias("attn_qkv"),
    }


def _mpt(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    most = fields.number("attention.max_alibi_bias")
    limit = fields.number("attention.clamp_kqv")
    return {"attn_config": {"alibi": bool(most), "alibi_bias_max": most or 8.0, "clip_qkv": limit}}


def _encoder(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {"type_vocab_size": fields.rows("token_types.weight")}
    if "position_embd.weight" in fields.file.tensors:
        found["max_position_embeddings"] = fields.rows("position_embd.weight")
    return found


def _bert(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    """BERT, RoBERTa and XLM-RoBERTa, which differ in nothing once positions count from 0.

    A classifier is a dense layer with tanh, which BERT has as its pooler, and a matrix to the labels.
    """
    found = _encoder(fields, raw)
    tensors = fields.file.tensors
    if not any(name.startswith("cls.") for name in tensors):
        return found
    if not {"cls.weight", "cls.output.weight"} <= set(tensors):
        raise FileError(
            f"{fields.file.path}: the classifier is not whole (cls.weight and cls.output.weight), for the "
            "layer before it was left out when the file was made: use the model's own checkpoint"
        )
    shape = tensors["cls.output.weight"].shape
    count = 1 if len(shape) == 1 else shape[0]
    found |= {"architectures": ["BertForSequenceClassification"], "num_labels": count}
    names = fields.get("classifier.output_labels")
    if isinstance(names, list) and len(names) == count:
        found["id2label"] = {str(number): name for number, name in enumerate(names)}
    return found


def _nomic(fields: Fields, raw: Mapping[str, object]) -> dict[str, object]:
    length = raw["max_position_embeddings"]
    return _encoder(fields, raw) | {"max_trained_positions": length, "n_positions": length}


_SOFTCAPS = {name: name for name in ("final_logit_softcapping", "attn_logit_softcapping")}
GRANITE = {
    **HEADS,
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def decoder(
    architecture: str,
    model_type: str,
    more: More = _decoder,
    *,
    needed: Mapping[str, str] = _NONE,
    others: Mapping[str, str] = HEADS,
    fixed: Mapping[str, object] = _NONE,
) -> Family:
    """A family of decoders; `needed` is beside what all of them need."""
    needed = {**DECODER, **needed}
    return Family(architecture, model_type, needed=needed, others=others, fixed=fixed, more=more)


_LLAMA = decoder("LlamaForCausalLM", "llama", _llama)

DENSE: Mapping[str, Family] = {
    "llama": _LLAMA,
    "internlm2": _LLAMA,
    "smollm3": decoder("SmolLM3ForCausalLM", "smollm3", fixed={"no_rope_layer_interval": 4}),
    "arcee": decoder("ArceeForCausalLM", "arcee"),
    "ernie4_5": decoder("Ernie4_5ForCausalLM", "ernie4_5"),
    "seed_oss": decoder("SeedOssForCausalLM", "seed_oss"),
    "granite": decoder("GraniteForCausalLM", "granite", _granite, others=GRANITE),
    "qwen2": decoder("Qwen2ForCausalLM", "qwen2"),
    "qwen3": decoder("Qwen3ForCausalLM", "qwen3"),
    "gemma": decoder("GemmaForCausalLM", "gemma"),
    "gemma2": decoder("Gemma2ForCausalLM", "gemma2", _gemma2, others={**HEADS, **_SOFTCAPS}),
    "gemma3": decoder("Gemma3ForCausalLM", "gemma3_text", _gemma3, others={**HEADS, **_SOFTCAPS}),
    "olmo2": decoder("Olmo2ForCausalLM", "olmo2", _olmo2),
    "phi3": decoder("Phi3ForCausalLM", "phi3", _phi3),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "gpt2",
        needed={
            "n_positions": "context_length",
            "n_embd": "embedding_length",
            "n_layer": "block_count",
            "n_inner": "feed_forward_length",
            "n_head": "attention.head_count",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
    ),
    "bloom": Family("BloomForCausalLM", "bloom", needed=_BLOOM, fixed={"qkv_in_one": True}),
    "falcon": Family(
        "FalconForCausalLM",
        "falcon",
        needed={**_BLOOM, "ffn_hidden_size": "feed_forward_length"},
        others={"num_kv_heads": "attention.head_count_kv", "rope_theta": "rope.freq_base"},
        fixed={"qkv_in_one": True},
        more=_falcon,
    ),
    "mpt": Family(
        "MptForCausalLM",
        "mpt",
        needed={
            "max_seq_len": "context_length",
            "d_model": "embedding_length",
            "n_layers": "block_count",
            "n_heads": "attention.head_count",
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        more=_mpt,
    ),
    "bert": Family("BertModel", "bert", needed=_ENCODER, more=_bert),
    "nomic-bert": Family(
        "NomicBertModel",
        "nomic_bert",
        needed=_ENCODER,
        others={"rotary_emb_base": "rope.freq_base"},
        fixed={"activation_function": "swiglu"},
        more=_nomic,
    ),
}
"""The architectures without experts that are read, by the name that the field `general.architecture` has."""
