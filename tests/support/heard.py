"""Tiny random checkpoints of models that hear, with what transformers' own models take for a sound."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from pictured import write_pictured
from safetensors.torch import load_file, save_file
from shape_files import read_shapes
from sounds import RATE
from torch import nn
from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

Inputs = dict[str, Any]
AUDIO = 310
"""The token that stands for sounds."""
BANDS = 16


class Family(NamedTuple):
    architecture: str
    fields: dict[str, Any]
    extractor: Any
    inputs: Callable[[Any, list[np.ndarray]], Inputs]
    seconds: float = 30
    """The longest sound."""
    least: float = 0
    """The seconds below which a sound is refused."""


def _in_pieces(extractor: Any, sounds: list[np.ndarray]) -> Inputs:
    made = extractor(sounds, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    return {"input_features": made.input_features, "feature_attention_mask": made.attention_mask}


def _each_alone(extractor: Any, sounds: list[np.ndarray]) -> Inputs:
    """Sounds beside longer ones would end in silence, and not in their own samples."""
    made = [extractor(each, sampling_rate=RATE, padding=True, return_attention_mask=True) for each in sounds]
    most = max(each.input_features.shape[-1] for each in made)
    features, masks = (
        torch.cat([F.pad(each[name], (0, most - each[name].shape[-1])) for each in made])
        for name in ("input_features", "attention_mask")
    )
    return {"input_features": features, "input_features_mask": masks}


def _whole_pieces(extractor: Any, sounds: list[np.ndarray]) -> Inputs:
    """Pieces of 30 seconds; the features are those of a whole sound, with silence behind it."""
    settings = {"padding": True, "truncation": False, "pad_to_multiple_of": 30 * RATE, "return_tensors": "pt"}
    made = [extractor(each, sampling_rate=RATE, **settings).input_features for each in sounds]
    return {"input_features": torch.cat([each.reshape(BANDS, -1, 3000).transpose(0, 1) for each in made])}


_FIELDS = read_shapes("pictured")
FAMILIES = {
    "voxtral": Family(
        "VoxtralForConditionalGeneration",
        _FIELDS["voxtral"],
        WhisperFeatureExtractor(feature_size=BANDS),
        _whole_pieces,
        seconds=2400,
    ),
    "qwen3 asr": Family(
        "Qwen3ASRForConditionalGeneration",
        _FIELDS["qwen3 asr"],
        Qwen3ASRFeatureExtractor(feature_size=BANDS),
        _each_alone,
        seconds=1200,
    ),
    "qwen2 audio": Family(
        "Qwen2AudioForConditionalGeneration",
        _FIELDS["qwen2 audio"],
        WhisperFeatureExtractor(feature_size=BANDS),
        _in_pieces,
        least=0.03,
    ),
}
FAMILIES["qwen3 asr as published"] = FAMILIES["qwen3 asr"]

_PUBLISHED = {
    "lm_head.": "thinker.lm_head.",
    "model.language_model.": "thinker.model.",
    "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
    "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
    "model.": "thinker.",
}
"""Scopes as transformers has them -> as Qwen published them."""


def publish(folder: Path) -> None:
    """Gives a Qwen3-ASR that transformers wrote the form in which Qwen published it.

    Its head is stored, although it is tied; the rope has sections, though all positions of a token are one.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text, audio = (dict(config[name]) for name in ("text_config", "audio_config"))
    text |= {"model_type": "qwen3", "eos_token_id": None, "dtype": None, "tie_word_embeddings": True}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    sections = {"interleaved": True, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    text["rope_scaling"] = {**sections, "rope_type": "default", "type": "default"}
    audio |= {"model_type": "qwen3_asr_audio_encoder", "max_source_positions": 1500, "dtype": None}
    thinker = {
        "model_type": "qwen3_asr",
        "architectures": config["architectures"],
        "audio_config": audio,
        "audio_token_id": config["audio_token_id"],
        "dtype": "float32",
        "text_config": text,
    }
    outside = {"support_languages": ["English", "German"], "thinker_config": thinker}
    names = ("architectures", "model_type")
    path.write_text(json.dumps({**{name: config[name] for name in names}, **outside}))
    end = config["text_config"]["eos_token_id"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "do_sample": False}))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file({_published(name): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})


def _published(name: str) -> str:
    there = next(scope for scope in _PUBLISHED if name.startswith(scope))
    return _PUBLISHED[there] + name.removeprefix(there)


def publish_tokenizer(folder: Path) -> Any:
    """Gives a checkpoint's tokenizer the files that Qwen published: there is no tokenizer.json, and the
    template writes no answers. Returns what transformers reads them as."""
    path = folder / "tokenizer.json"
    saved = json.loads(path.read_text())
    path.unlink()
    (folder / "vocab.json").write_text(json.dumps(saved["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in saved["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    added = {each.pop("id"): each for each in saved["added_tokens"]}
    said = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
    said |= {"bos_token": None, **dict.fromkeys(("eos_token", "pad_token", "unk_token"), added[0]["content"])}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return transformers.Qwen2Tokenizer.from_pretrained(folder).backend_tokenizer


_TEMPLATE = """
{%- set found = namespace(said='', sounds='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set found.said = found.said + m.content -%}{%- endif -%}
{%- for part in m.content if m.content is not string and part.type == 'audio' -%}
{%- set found.sounds = found.sounds + '<|audio_start|><|audio_pad|><|audio_end|>' -%}
{%- endfor -%}
{%- endfor -%}
{{- 'system: ' + found.said + ' user: ' + found.sounds + ' ' -}}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""


class Heard:
    """A checkpoint that was written, and the model of transformers."""

    def __init__(self, name: str, folder: Path, **changes: object) -> None:
        self.name, self.family, self.folder = name, FAMILIES[name], folder
        settings, fields = self.family.extractor.to_dict(), self.family.fields | changes
        self.model: nn.Module = write_pictured(self.family.architecture, folder, fields, settings)
        if "published" in name:
            publish(folder)

    def inputs(self, sounds: Sequence[np.ndarray]) -> Inputs:
        return self.family.inputs(self.family.extractor, list(sounds))
