"""A tiny Gemma 3, whose tokens of pictures see each other: its config, its settings, transformers' inputs."""

from __future__ import annotations

from typing import Any

import torch
from pictured import TEXT, VISION
from PIL.Image import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

SETTINGS: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 56, "width": 56},
}
SOFT = 310
FIELDS: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "num_hidden_layers": 4,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "vision_config": {**VISION, "image_size": 56, "model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 4,
    "image_token_index": SOFT,
    "boi_token_index": 311,
    "eoi_token_index": 312,
}


def inputs(pictures: list[Image], ids: list[int]) -> dict[str, Any]:
    """What transformers' model takes beside ids."""
    processor = Gemma3ImageProcessorPil(**SETTINGS)
    pixels = processor([[each] for each in pictures], return_tensors="pt")["pixel_values"]
    return {"pixel_values": pixels, "token_type_ids": (torch.tensor([ids]) == SOFT).long()}
