"""A tiny Gemma 3, whose tokens of pictures see each other: its config, its settings, transformers' inputs."""

from __future__ import annotations

from typing import Any

import torch
from PIL.Image import Image
from shape_files import read_shapes
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

SETTINGS, FIELDS = (read_shapes("pictured")[name] for name in ("gemma3 settings", "gemma3"))
SOFT = 310


def inputs(pictures: list[Image], ids: list[int]) -> dict[str, Any]:
    """What transformers' model takes beside ids."""
    processor = Gemma3ImageProcessorPil(**SETTINGS)
    pixels = processor([[each] for each in pictures], return_tensors="pt")["pixel_values"]
    return {"pixel_values": pixels, "token_type_ids": (torch.tensor([ids]) == SOFT).long()}
