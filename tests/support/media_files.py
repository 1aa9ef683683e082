"""Media for tests: pictures, and the settings that checkpoints have for them."""

import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from models.media.files import MediaFiles

TOWER = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_CONFIG: dict[str, Any] = {"image_token_id": 7, "vision_config": TOWER}
QWEN_SETTINGS = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 1_003_520}
QWEN = MediaFiles("Qwen2VLForConditionalGeneration", QWEN_CONFIG, QWEN_SETTINGS)


def tower(kind: str, **fields: object) -> dict[str, Any]:
    """A config with the tower of a fixed size."""
    return {"vision_config": {"model_type": f"{kind}_vision_model", **fields}}


def media_files(architecture: str, config: Mapping[str, Any], settings: Any) -> MediaFiles:
    """`settings`: a dict, or an image processor of transformers."""
    given = settings if isinstance(settings, dict) else json.loads(settings.to_json_string())
    return MediaFiles(architecture, dict(config), given)


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * 7919 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def saved(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()
