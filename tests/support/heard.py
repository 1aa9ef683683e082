"""Tiny random checkpoints of models that hear, with what transformers' own models take for a sound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pictured import TEXT, write_pictured
from sounds import RATE
from torch import nn
from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

Inputs = dict[str, Any]
AUDIO = 310
"""The token that stands for sounds."""
BANDS = 16
LAYERS = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}


class Family(NamedTuple):
    architecture: str
    fields: dict[str, Any]
    extractor: Any
    inputs: Callable[[Any, list[np.ndarray]], Inputs]


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


FAMILIES = {
    "qwen3 asr": Family(
        "Qwen3ASRForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen3", "tie_word_embeddings": True},
            "audio_config": {
                **LAYERS,
                "num_mel_bins": BANDS,
                "model_type": "qwen3_asr_encoder",
                "n_window": 50,
                "n_window_infer": 200,
                "downsample_hidden_size": 8,
                "output_dim": TEXT["hidden_size"],
                "max_position_embeddings": 13,
            },
            "audio_token_id": AUDIO,
        },
        Qwen3ASRFeatureExtractor(feature_size=BANDS),
        _each_alone,
    ),
    "qwen2 audio": Family(
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {**LAYERS, "num_mel_bins": BANDS, "model_type": "qwen2_audio_encoder"},
            "audio_token_index": AUDIO,
        },
        WhisperFeatureExtractor(feature_size=BANDS),
        _in_pieces,
    ),
}


class Heard:
    """A checkpoint that was written, and the model of transformers."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.family, self.folder = name, FAMILIES[name], folder
        settings = self.family.extractor.to_dict()
        self.model: nn.Module = write_pictured(self.family.architecture, folder, self.family.fields, settings)

    def inputs(self, sounds: Sequence[np.ndarray]) -> Inputs:
        return self.family.inputs(self.family.extractor, list(sounds))
