"""Pictures that are all brought to one size: how CLIP's kind, SigLIP's and Gemma 3's towers take them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from models.media.files import SETTINGS, MediaFiles, PictureSettings, Side, read_facts, read_settings
from models.media.item import Picture, Prepared
from models.media.resize import center_cropped, check_ratio, to_item
from models.plain_files import ConfigError

_HALF = (0.5, 0.5, 0.5)
CLIP = {
    "resample": 3,
    "size": 224,
    "crop_size": 224,
    "do_center_crop": True,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
"""The settings of transformers' CLIPImageProcessor; and of those of SigLIP and Gemma 3:"""
SIGLIP = {"resample": 3, "size": {"height": 224, "width": 224}, "image_mean": _HALF, "image_std": _HALF}
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


class FixedSize:
    """The step from a picture of any size to the only one that a tower takes."""

    def __init__(self, files: MediaFiles, defaults: Mapping[str, Mapping[str, object]]) -> None:
        """`defaults`: the classes of image processor that the family knows, as for `read_settings`."""
        tower = read_facts(files, _Facts).vision_config
        if tower.model_type not in _TOWERS:
            known = " or ".join(_TOWERS)
            raise ConfigError(
                f"config.json: the tower is '{tower.model_type[:80]}', and only {known} is served"
            )
        self.has_class_token = tower.model_type == "clip_vision_model"
        side, patch = _TOWERS[tower.model_type]
        self.side, self.patch = tower.image_size or side, tower.patch_size or patch
        self.patches = (self.side // self.patch) ** 2
        self.settings = settings = read_settings(files, FixedSettings, defaults)
        size = settings.size
        self._first = size if isinstance(size, dict) else {"shortest_edge": size}
        square = {"height": self.side, "width": self.side}
        final = settings.crop_size if settings.do_center_crop else self._first
        if final not in (square, self.side) or set(self._first) not in ({"shortest_edge"}, set(square)):
            raise ConfigError(
                f"{SETTINGS}: pictures do not become {self.side} x {self.side}, the size of the tower's"
            )

    def prepare(self, picture: Picture, embeddings: int) -> Prepared:
        picture = picture.resize(self._resized(*picture.size), self.settings.resample)
        if self.settings.do_center_crop:
            picture = center_cropped(picture, self.side)
        return to_item(picture, self.patch, embeddings)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        if (short := self._first.get("shortest_edge")) is None:
            return self._first["width"], self._first["height"]
        check_ratio(width, height)
        long = int(short * max(width, height) / min(width, height))
        return (short, long) if width <= height else (long, short)
