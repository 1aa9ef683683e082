"""LLaVA-1.5: a picture of one size, whose patches, and with some checkpoints a class token, become tokens."""

from __future__ import annotations

from typing import Literal

import msgspec

from models.media.files import MediaFiles, read_facts
from models.media.fixed_size import CLIP, SIGLIP, FixedSize
from models.media.item import Layout, Picture, Prepared, Processor
from models.media.pixtral import PixtralProcessor

_DEFAULTS = {"CLIPImageProcessor": CLIP, "SiglipImageProcessor": SIGLIP, "LlavaImageProcessor": CLIP}


def llava_processor(files: MediaFiles) -> Processor:
    """The processor of a LLaVA, whose class also serves Pixtral."""
    tower = read_facts(files, _Towers).vision_config
    return PixtralProcessor(files) if tower.model_type == "pixtral" else LlavaProcessor(files)


class _Tower(msgspec.Struct, frozen=True):
    model_type: str = ""


class _Towers(msgspec.Struct, frozen=True):
    vision_config: _Tower


class _Facts(msgspec.Struct, frozen=True):
    image_token_index: int = 32_000
    vision_feature_select_strategy: Literal["default", "full"] = "default"
    """Whether the tower's first row is left out."""


class LlavaProcessor:
    placeholder = written = "<image>"

    def __init__(self, files: MediaFiles) -> None:
        self._size = FixedSize(files, _DEFAULTS)
        self.settings = self._size.settings
        facts = read_facts(files, _Facts)
        self._token = facts.image_token_index
        leaves_out = facts.vision_feature_select_strategy == "default"
        self._embeddings = self._size.patches + self._size.has_class_token - leaves_out

    def prepare(self, picture: Picture) -> Prepared:
        return self._size.prepare(picture, self._embeddings)

    def layout(self, prepared: Prepared) -> Layout:
        return Layout([self._token] * prepared.embeddings, [(0, prepared.embeddings)])
