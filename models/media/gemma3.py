"""Gemma 3: a picture of one size becomes a fixed number of tokens between two marks, in lines of its own."""

from __future__ import annotations

from math import isqrt
from typing import Annotated

import msgspec

from models.media.files import MediaFiles, read_facts
from models.media.fixed_size import GEMMA3, SIGLIP, FixedSize
from models.media.item import Layout, Picture, Prepared
from models.plain_files import ConfigError

_DEFAULTS = {"Gemma3ImageProcessor": GEMMA3, "SiglipImageProcessor": SIGLIP}


class _Facts(msgspec.Struct, frozen=True):
    image_token_index: int = 262_144
    boi_token_index: int = 255_999
    eoi_token_index: int = 256_000
    mm_tokens_per_image: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 256


class Gemma3Processor:
    placeholder = written = "<start_of_image>"

    def __init__(self, files: MediaFiles) -> None:
        self._size = FixedSize(files, _DEFAULTS)
        self.settings = self._size.settings
        self._facts = read_facts(files, _Facts)
        side, count = isqrt(self._size.patches), self._facts.mm_tokens_per_image
        if isqrt(count) ** 2 != count or side % isqrt(count):
            raise ConfigError(
                f"config.json: the field 'mm_tokens_per_image' is {count}, which does not cut {side} x "
                f"{side} patches into equal squares"
            )

    def prepare(self, picture: Picture) -> Prepared:
        return self._size.prepare(picture, self._facts.mm_tokens_per_image)

    def layout(self, prepared: Prepared) -> Layout:
        count, facts = prepared.embeddings, self._facts
        tokens = [facts.boi_token_index, *[facts.image_token_index] * count, facts.eoi_token_index]
        return Layout(tokens, [(1, count)], before="\n\n", after="\n\n")
