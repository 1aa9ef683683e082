"""Composite checkpoints: models of images and text, whose text a family's own class serves. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

TRUNKS = (
    "language_model.model",
    "llm.model",
    "model.language_model",
    "model.text_model",
    "thinker.model",
    "language_model",
    "model",
    "",
)
"""The scopes in which a trunk may lie: six of composites, that beside a head, and that of a trunk alone."""
HEADS = ("language_model.lm_head", "llm.lm_head", "thinker.lm_head", "lm_head")


@dataclass(frozen=True, kw_only=True)
class Composite:
    """A composite architecture: which classes serve its text and its media."""

    texts: Mapping[str, str]
    """The model_types of the texts that are served, and the architecture whose class computes each."""
    beside: tuple[str, ...]
    """The scopes of weights that text does not need."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Fields that published files leave out of their text_config, because transformers has these values."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields that have these values whatever the text_config says."""
    text_field: str = "text_config"
    """The field of config.json that has the text's."""
    tower: str = ""
    """The class of its tower, "module:Class" in `models.towers`; empty: text alone is served."""


_TEXTS: Mapping[str, Mapping[str, object]] = {
    "gemma": {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
    },
}
"""Fields of texts that composites leave out, by the text's model_type, for the same reason."""
_VISION_TOWER = (
    "vision_tower",
    "multi_modal_projector",
    "model.vision_tower",
    "model.multi_modal_projector",
)
_VISION_AND_NEWLINE = (*_VISION_TOWER, "image_newline", "model.image_newline")
_AUDIO_TOWER = (
    "audio_tower",
    "multi_modal_projector",
    "model.audio_tower",
    "model.multi_modal_projector",
    "thinker.audio_tower",
)
_TEXT_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_QWEN3 = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_IDEFICS3 = Composite(
    texts={"llama": "LlamaForCausalLM"},
    beside=("model.vision_model", "model.connector"),
    tower="siglip:Idefics3Tower",
)
_PALIGEMMA = Composite(
    texts={"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM"},
    beside=_VISION_TOWER,
    tower="siglip:PaliGemmaTower",
    fixed={"use_bidirectional_attention": None},  # newer files say that prompts see both ways; answers do not
)
_DEEPSEEK_OCR = (
    "model.sam_model",
    "model.vision_model",
    "model.qwen2_model",
    "model.projector",
    "model.image_newline",
    "model.view_seperator",
)
_DEEPSEEK_TEXT = {
    "vocab_size": 102_400,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1407,
}
_GOT_TEXT = {
    "vocab_size": 151_860,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rope_theta": 1_000_000.0,
}
_VISION_AND_AUDIO = ("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio")


def _qwen(tower: str, **texts: str) -> Composite:
    """Make a composite of Qwen. Files of 2024 and 2025 have the text's fields at the top of config.json."""
    return Composite(texts=texts, beside=("model.visual", "visual"), tower=f"qwen_vl:{tower}")


def _deepseek_ocr(tower: str) -> Composite:
    """Make a composite of DeepSeek's own files, which do not say the model_type of the text."""
    return Composite(
        texts={"deepseek_v2": "DeepseekOcr2ForConditionalGeneration"},
        beside=_DEEPSEEK_OCR,
        defaults={"model_type": "deepseek_v2"},
        text_field="language_config",
        tower=f"documents.deepseek_ocr:{tower}",
    )


COMPOSITES: Mapping[str, Composite] = {
    "ColPaliForRetrieval": replace(_PALIGEMMA, beside=tuple(f"vlm.{scope}" for scope in _VISION_TOWER)),
    "ColQwen2ForRetrieval": Composite(
        texts={"qwen2_vl_text": "Qwen2ForCausalLM", "qwen2_vl": "Qwen2ForCausalLM"},
        beside=("vlm.model.visual", "vlm.visual"),
        tower="qwen_vl:Qwen2Tower",
    ),
    "DeepseekOcr2ForConditionalGeneration": Composite(
        texts={"deepseek_ocr2_text": "DeepseekOcr2ForConditionalGeneration"},
        beside=(*_VISION_TOWER, "model.view_separator", *_DEEPSEEK_OCR),
        defaults=_DEEPSEEK_TEXT,
        tower="documents.deepseek_ocr:DeepseekOcr2Tower",
    ),
    "DeepseekOCR2ForCausalLM": _deepseek_ocr("DeepseekOcr2Tower"),
    "DeepseekOCRForCausalLM": _deepseek_ocr("DeepseekOcrTower"),
    "Gemma3ForConditionalGeneration": Composite(
        texts={"gemma3_text": "Gemma3ForCausalLM"},
        beside=_VISION_TOWER,
        tower="siglip:Gemma3Tower",
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
        },
    ),
    "Gemma3nForConditionalGeneration": Composite(
        texts={"gemma3n_text": "Gemma3nForCausalLM"},
        beside=_VISION_AND_AUDIO,
    ),
    "Gemma4ForConditionalGeneration": Composite(
        texts={"gemma4_text": "Gemma4ForCausalLM"},
        beside=_VISION_AND_AUDIO,
        tower="gemma4:Gemma4Tower",
    ),
    "Gemma4UnifiedForConditionalGeneration": Composite(
        texts={"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
        beside=("model.vision_embedder", "model.embed_vision", "model.embed_audio"),
        tower="gemma4:Gemma4UnifiedTower",
    ),
    "GotOcr2ForConditionalGeneration": Composite(
        texts={"qwen2": "Qwen2ForCausalLM"},
        beside=_VISION_TOWER,
        defaults=_GOT_TEXT,
        tower="documents.sam:GotOcr2Tower",
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "InternVLForConditionalGeneration": Composite(
        texts={**_TEXT_CLASSES, **_QWEN3},
        beside=_VISION_TOWER,
        tower="tiling.internvl:InternVLTower",
    ),
    "InternVLChatModel": Composite(
        texts={**_TEXT_CLASSES, **_QWEN3},
        beside=("vision_model", "mlp1"),
        text_field="llm_config",
        tower="tiling.internvl:InternVLChatTower",
    ),
    "LlavaForConditionalGeneration": Composite(
        texts=_TEXT_CLASSES, beside=_VISION_TOWER, tower="llava:LlavaTower"
    ),
    "LlavaNextForConditionalGeneration": Composite(
        texts=_TEXT_CLASSES, beside=_VISION_AND_NEWLINE, tower="llava:LlavaNextTower"
    ),
    "LlavaOnevisionForConditionalGeneration": Composite(
        texts={"qwen2": "Qwen2ForCausalLM"},
        beside=_VISION_AND_NEWLINE,
        tower="llava:LlavaOnevisionTower",
    ),
    "MiniCPMV": Composite(
        texts={
            "minicpmv 2.5": "LlamaForCausalLM",
            "minicpmv 2.6": "Qwen2ForCausalLM",
            "minicpmv 4.0": "LlamaForCausalLM",
            "minicpmv 4.5": "Qwen3ForCausalLM",
        },
        beside=("vpm", "resampler"),
        tower="tiling.minicpmv:MiniCPMVTower",
    ),
    "Mistral3ForConditionalGeneration": Composite(
        texts={
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
        beside=_VISION_TOWER,
        tower="llava:Mistral3Tower",
    ),
    "JinaVLForRanking": _qwen("Qwen2Tower", qwen2_vl_text="Qwen2ForCausalLM", qwen2_vl="Qwen2ForCausalLM"),
    "PaliGemmaForConditionalGeneration": _PALIGEMMA,
    "Qwen2AudioForConditionalGeneration": Composite(
        texts={"qwen2": "Qwen2ForCausalLM"}, beside=_AUDIO_TOWER, tower="audio:Qwen2AudioTower"
    ),
    "Qwen2VLForConditionalGeneration": _qwen(
        "Qwen2Tower", qwen2_vl_text="Qwen2ForCausalLM", qwen2_vl="Qwen2ForCausalLM"
    ),
    "Qwen2_5_VLForConditionalGeneration": _qwen(
        "Qwen25Tower", qwen2_5_vl_text="Qwen2ForCausalLM", qwen2_5_vl="Qwen2ForCausalLM"
    ),
    "Qwen3ASRForConditionalGeneration": Composite(
        texts=dict.fromkeys(("qwen3", "qwen3_asr_text"), "Qwen3ForCausalLM"),
        beside=_AUDIO_TOWER,
        tower="audio:Qwen3ASRTower",
    ),
    "Qwen3_5ForConditionalGeneration": _qwen("Qwen3Tower", qwen3_5_text="Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": _qwen("Qwen3Tower", qwen3_5_moe_text="Qwen3_5MoeForCausalLM"),
    "Qwen3VLForConditionalGeneration": _qwen("Qwen3Tower", qwen3_vl_text="Qwen3ForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": _qwen(
        "Qwen3Tower", qwen3_vl_moe_text="Qwen3VLMoeForConditionalGeneration"
    ),
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "VoxtralForConditionalGeneration": Composite(
        texts={"llama": "LlamaForCausalLM"},
        beside=_AUDIO_TOWER,
        tower="audio:VoxtralTower",
        defaults={
            "vocab_size": 131_072,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100_000_000.0,
            "head_dim": 128,
        },
    ),
}

_SIGLIP: Mapping[str, object] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_COMPARED: Mapping[str, Mapping[str, object]] = {
    "CLIPModel": {
        "vocab_size": 49_408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "Siglip2Model": _SIGLIP,
    "SiglipModel": _SIGLIP,
}
"""Such fields of texts that are compared with pictures, by the architecture of both."""


_NESTED = ("vlm_config", "transformer_layer_config", "thinker_config")


def unnested(whole: Mapping[str, object]) -> dict[str, object]:
    """The fields of config.json, with those that lie in an object of their own.

    Models for retrieval have those of the model of text and pictures there, drafters in the format of
    `speculators` those of their layer, and Qwen3-ASR those of the model without its list of languages.
    """
    nested = next((whole[name] for name in _NESTED if name in whole), None)
    if not isinstance(nested, Mapping):
        return dict(whole)
    inner = cast("Mapping[str, object]", nested)
    return {**inner, **whole, "model_type": inner.get("model_type")}


def text_part(whole: Mapping[str, object]) -> Mapping[str, object] | None:
    """The text's part of config.json, with what its architecture leaves out; None if there is none."""
    names = whole.get("architectures")
    name = cast("object", names[0]) if isinstance(names, list) and names else None
    known = COMPOSITES.get(name) if isinstance(name, str) else None
    if name == "MiniCPMV":  # the text's fields are at the top, and its model_type is the same for all texts
        return {**whole, "model_type": f"minicpmv {minicpmv_version(whole)}"}
    text = whole.get(known.text_field if known else "text_config")
    if not isinstance(text, Mapping):
        return None
    if isinstance(name, str) and name in _COMPARED:
        width = {"projection_size": whole.get("projection_dim", 512)} if name == "CLIPModel" else {}
        usual = {"num_hidden_layers": 12, **_COMPARED[name]}
        return {**usual, **cast("Mapping[str, object]", text), **width}
    if known is None:
        return cast("Mapping[str, object]", text)
    kind = cast("object", text.get("model_type"))
    usual = _TEXTS.get(kind, {}) if isinstance(kind, str) else {}
    return {**usual, **known.defaults, **cast("Mapping[str, object]", text), **known.fixed}


def minicpmv_version(whole: Mapping[str, object]) -> str:
    """The version of a MiniCPM-V, which says what its text is. The first two do not say it in config.json."""
    if (version := whole.get("version")) is not None:
        return str(version)
    return "2.0" if whole.get("hidden_size") == 2304 and whole.get("query_num") == 64 else "2.5"
