"""Families whose pictures are all brought to one size: CLIP, SigLIP, LLaVA-1.5, PaliGemma and Gemma 3."""

from __future__ import annotations

from math import isqrt
from typing import Annotated, ClassVar, Literal

import msgspec

from models.media.files import (
    CLIP_PIXELS,
    HALF_PIXELS,
    SETTINGS,
    Classes,
    MediaFiles,
    PictureSettings,
    Side,
    read_facts,
    read_settings,
)
from models.media.item import Layout, Picture, Prepared, Processor, run_of
from models.media.kept_shape import PixtralProcessor
from models.media.resize import center_cropped, check_ratio, to_item
from models.plain_files import ConfigError

CLIP = {"resample": 3, "size": 224, "crop_size": 224, "do_center_crop": True, **CLIP_PIXELS}
"""The settings of transformers' CLIPImageProcessor; and of those of SigLIP and Gemma 3:"""
SIGLIP = {"resample": 3, "size": {"height": 224, "width": 224}, **HALF_PIXELS}
GEMMA3 = {**SIGLIP, "resample": 2}

_TOWERS = {"clip_vision_model": (224, 32), "siglip_vision_model": (224, 16)}
"""The sides of pictures and patches where a tower's config does not tell, by its model_type."""


class FixedSettings(PictureSettings, frozen=True, kw_only=True):
    size: Side | dict[str, Side]
    """The size to which pictures are resized; a number is the shorter side."""
    crop_size: Side | dict[str, Side] = 224
    do_center_crop: bool = False


class _Tower(msgspec.Struct, frozen=True):
    model_type: str = ""
    image_size: Side | None = None
    patch_size: Side | None = None


class _Facts(msgspec.Struct, frozen=True):
    vision_config: _Tower
    image_token_index: int | None = None
    boi_token_index: int = 255_999
    eoi_token_index: int = 256_000
    mm_tokens_per_image: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 256
    vision_feature_select_strategy: Literal["default", "full"] | None = None
    """Whether the tower's first row is left out, which is a class token where there is one."""
    vision_aspect_ratio: str | None = None


class FixedSizeProcessor:
    """Brings pictures to the only size that a tower takes, each of whose patches becomes a token."""

    placeholder = written = "<image>"
    classes: ClassVar[Classes] = {"SiglipImageProcessor": SIGLIP}
    usual_token: ClassVar[int] = 0
    """The token of a patch where config.json does not tell."""
    settings: PictureSettings

    def __init__(self, files: MediaFiles) -> None:
        self.facts = facts = read_facts(files, _Facts)
        tower, given = facts.vision_config, facts.image_token_index
        if tower.model_type not in _TOWERS:
            known = " or ".join(_TOWERS)
            raise ConfigError(
                f"config.json: the tower is '{tower.model_type[:80]}', and only {known} is served"
            )
        self.has_class_token = tower.model_type == "clip_vision_model"
        self.token = self.usual_token if given is None else given
        side, patch = _TOWERS[tower.model_type]
        self.side, self.patch = tower.image_size or side, tower.patch_size or patch
        self.embeddings = self.patches = (self.side // self.patch) ** 2
        self.settings = settings = read_settings(files, FixedSettings, self.classes)
        self._crops, size = settings.do_center_crop, settings.size
        self._first = size if isinstance(size, dict) else {"shortest_edge": size}
        square = {"height": self.side, "width": self.side}
        final = settings.crop_size if self._crops else self._first
        if final not in (square, self.side) or set(self._first) not in ({"shortest_edge"}, set(square)):
            raise ConfigError(
                f"{SETTINGS}: pictures do not become {self.side} x {self.side}, the size of the tower's"
            )

    def prepare(self, picture: Picture) -> Prepared:
        picture = picture.resize(self._resized(*picture.size), self.settings.resample)
        picture = center_cropped(picture, self.side) if self._crops else picture
        return to_item(picture, self.patch, self.embeddings)

    def layout(self, prepared: Prepared) -> Layout:
        return run_of(self.token, self.embeddings)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        if (short := self._first.get("shortest_edge")) is None:
            return self._first["width"], self._first["height"]
        check_ratio(width, height)
        long = int(short * max(width, height) / min(width, height))
        return (short, long) if width <= height else (long, short)


class ClipProcessor(FixedSizeProcessor):
    """A picture is compared with texts: it is a prompt of its own, of one position."""

    placeholder = written = ""
    classes = {"CLIPImageProcessor": CLIP}

    def __init__(self, files: MediaFiles) -> None:
        super().__init__(files)
        self.embeddings = 1


class SiglipProcessor(ClipProcessor):
    """The same for SigLIP, and for SigLIP 2 in fixed resolutions, which has the classes of SigLIP."""

    classes = {"SiglipImageProcessor": SIGLIP}


class PaliGemmaProcessor(FixedSizeProcessor):
    usual_token = 256_000


class ColPaliProcessor(PaliGemmaProcessor):
    """Pages for search, each of which is a prompt of its own: no chat template writes it."""

    written = "<image><bos>Describe the image.\n"


class LlavaProcessor(FixedSizeProcessor):
    classes = {"CLIPImageProcessor": CLIP, "SiglipImageProcessor": SIGLIP, "LlavaImageProcessor": CLIP}
    usual_token = 32_000

    def __init__(self, files: MediaFiles) -> None:
        super().__init__(files)
        leaves_out = self.facts.vision_feature_select_strategy != "full"
        self.embeddings = self.patches + self.has_class_token - leaves_out


class Gemma3Processor(FixedSizeProcessor):
    """A picture becomes a fixed number of tokens between two marks, in lines of its own."""

    placeholder = written = "<start_of_image>"
    classes = {"Gemma3ImageProcessor": GEMMA3, "SiglipImageProcessor": SIGLIP}
    usual_token = 262_144

    def __init__(self, files: MediaFiles) -> None:
        super().__init__(files)
        side, count = isqrt(self.patches), self.facts.mm_tokens_per_image
        if isqrt(count) ** 2 != count or side % isqrt(count):
            raise ConfigError(
                f"config.json: the field 'mm_tokens_per_image' is {count}, which does not cut {side} x "
                f"{side} patches into equal squares"
            )
        self.embeddings = count

    def layout(self, prepared: Prepared) -> Layout:
        count, facts = self.embeddings, self.facts
        tokens = [facts.boi_token_index, *[self.token] * count, facts.eoi_token_index]
        return Layout(tokens, [(1, count)], before="\n\n", after="\n\n")


def llava_processor(files: MediaFiles) -> Processor:
    """The processor of a LLaVA, whose class also serves Pixtral."""
    tower = read_facts(files, _Tower, "vision_config")
    return PixtralProcessor(files) if tower.model_type == "pixtral" else LlavaProcessor(files)
