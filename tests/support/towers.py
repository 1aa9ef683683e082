"""Tiny towers: configs, the settings of their pictures, and items as workers hand them to towers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from media_files import noise
from tiny import EOS_ID, PAD_ID, VOCAB_SIZE, randomise, write_tokenizer
from torch import Tensor

from models.media.files import PictureSettings
from models.towers.tower import TowerInput

CLIP_PICTURES = PictureSettings(
    resample=3,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
)
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION = {**LAYERS, "image_size": 56, "patch_size": 14}


def item(width: int, height: int, seed: int = 0, embeddings: int = 1) -> TowerInput:
    """A picture whose pixels are noise, and other noise for every seed."""
    pixels = torch.from_numpy(np.roll(np.asarray(noise(width, height)), seed, axis=(0, 1)).copy())
    return TowerInput("image", pixels, (1, height // 14, width // 14), embeddings)


def normalised(one: TowerInput, pictures: PictureSettings) -> Tensor:
    """The pixels as transformers' processors on Pillow give them to a model: [1, 3, height, width]."""
    scaled = (one.pixels.numpy().astype(np.float64) * pictures.rescale_factor).astype(np.float32)
    mean, deviation = np.float32(pictures.image_mean), np.float32(pictures.image_std)
    return torch.from_numpy((scaled - mean) / deviation).permute(2, 0, 1)[None]


def comparing_checkpoint(architecture: str, folder: Path, **text: object) -> Path:
    """A tiny CLIP, SigLIP or SigLIP 2; `text` are fields of its text_config."""
    kind = architecture.removesuffix("Model")
    config_class = getattr(transformers, f"{kind}Config")
    texts = {**LAYERS, "num_attention_heads": 2, "max_position_embeddings": 24, "vocab_size": VOCAB_SIZE}
    own = {"projection_dim": 24} if kind == "CLIP" else {}
    shaped = kind == "Siglip2"
    config = config_class(
        text_config={**texts, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, **text},
        vision_config={**LAYERS, "patch_size": 14, "num_patches": 25} if shaped else VISION,
        architectures=[architecture],
        **own,
    )
    model = getattr(transformers, architecture)(config)
    randomise(model, seed=3, scale=0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    square = {"height": 56, "width": 56}
    sizes = {"patch_size": 14, "max_num_patches": 20} if shaped else {"size": square, "crop_size": square}
    settings = {"image_processor_type": f"{kind}ImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder
