"""MiniCPM-V: the whole picture, then slices of it, all of which the tower takes in sizes of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from models.composites import minicpmv_version
from models.media.files import MediaFiles, PictureSettings, Side, read_facts, read_settings, with_settings
from models.media.item import ORDINAL, Layout, Picture, Prepared, interleaved
from models.media.resize import check_ratio

_HALF = (0.5, 0.5, 0.5)
_DEFAULTS = {"MiniCPMVImageProcessor": {"resample": 3, "image_mean": _HALF, "image_std": _HALF}}
_NAMES = {"norm_mean": "image_mean", "norm_std": "image_std"}
"""What the authors call settings that all families have."""


class MiniCPMVSettings(PictureSettings, frozen=True, kw_only=True):
    max_slice_nums: Annotated[int, msgspec.Meta(ge=1, le=14)] = 9
    scale_resolution: Side = 448
    """The side of a square with as many pixels as the whole picture and each slice have, about."""
    slice_mode: Literal[True] = True
    use_image_id: bool = True


class _Tower(msgspec.Struct, frozen=True):
    patch_size: Side = 14


class _Facts(msgspec.Struct, frozen=True):
    vision_config: _Tower
    query_num: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64


class MiniCPMVProcessor:
    placeholder = written = "(<image>./</image>)"

    def __init__(self, files: MediaFiles) -> None:
        own = {ours: files.settings[theirs] for theirs, ours in _NAMES.items() if theirs in files.settings}
        self.settings = read_settings(with_settings(files, own), MiniCPMVSettings, _DEFAULTS)
        facts = read_facts(files, _Facts)
        self._patch, self._queries = facts.vision_config.patch_size, facts.query_num
        self._is_first = minicpmv_version(files.config) == "2.5"

    def prepare(self, picture: Picture) -> Prepared:
        check_ratio(*picture.size)
        (columns, rows), resample = self._shape(*picture.size), self.settings.resample
        slices = columns * rows if columns * rows > 1 else 0
        whole = picture.resize(self._size(*picture.size, enlarge=not slices), resample)
        grid = (1, whole.height // self._patch, whole.width // self._patch)
        pieces = [whole]
        if slices:
            part = max(1, round(picture.width / columns)), max(1, round(picture.height / rows))
            width, height = self._size(*part, enlarge=True)
            enlarged = picture.resize((columns * width, rows * height), resample)
            pieces += [
                enlarged.crop((x, y, x + width, y + height))
                for y in range(0, enlarged.height, height)
                for x in range(0, enlarged.width, width)
            ]
            grid = (rows, enlarged.height // self._patch, enlarged.width // self._patch)
        pixels = joined(pieces, self._patch)
        height, width, _ = pixels.shape
        return Prepared(
            kind="image",
            pixels=memoryview(pixels.tobytes()),
            shape=(height, width, 3),
            grid=grid,
            embeddings=(1 + slices) * self._queries,
        )

    def layout(self, prepared: Prepared) -> Layout:
        rows = prepared.grid[0]
        columns = (prepared.embeddings // self._queries - 1) // rows
        opens, closes = ("<image>", "</image>") if self._is_first else ("<slice>", "</slice>")
        text = "</image><slice>" if self._is_first and columns else "</image>"
        parts: list[int | str] = ["<image>", self._queries]
        for row in range(rows):
            for column in range(columns):
                line = "\n" if row > 0 and column == 0 else ""
                parts += [f"{text}{line}{opens}", self._queries]
                text = closes
        parts.append(f"{text}</slice>" if self._is_first and columns else text)
        numbered = self.settings.use_image_id and not self._is_first
        before = f"<image_id>{ORDINAL}</image_id>" if numbered else ""
        return msgspec.structs.replace(interleaved("<unk>", parts), before=before)

    def _shape(self, width: int, height: int) -> tuple[int, int]:
        """The columns and rows of slices whose ratio is nearest to the picture's; one means not to cut it."""
        most, side = self.settings.max_slice_nums, self.settings.scale_resolution
        wanted = min(most, math.ceil(width * height / side**2))
        if wanted <= 1:
            return 1, 1
        shapes = [
            (columns, count // columns)
            for count in (wanted - 1, wanted, wanted + 1)
            if 1 < count <= most
            for columns in range(1, count + 1)
            if count % columns == 0
        ]
        ratio = math.log(width / height)
        return min(shapes, key=lambda shape: abs(ratio - math.log(shape[0] / shape[1])))

    def _size(self, width: int, height: int, *, enlarge: bool) -> tuple[int, int]:
        """The size of about the area of the settings, in whole patches. A smaller picture is enlarged to it
        only if asked for."""
        side = self.settings.scale_resolution
        if enlarge or width * height > side * side:
            ratio = width / height
            height = int(side / math.sqrt(ratio))
            width = int(height * ratio)
        return self._in_patches(width), self._in_patches(height)

    def _in_patches(self, length: int) -> int:
        return max(1, round(length / self._patch)) * self._patch


def joined(pieces: Sequence[Picture], patch: int) -> np.ndarray:
    """One picture, as wide as the first piece, of the patches of all pieces, row by row, in order.

    The first piece stays as it is; below it lie the patches of the others, and black where the last row ends.
    """
    across = pieces[0].width // patch
    patches = [
        np.asarray(piece).reshape(-1, patch, piece.width // patch, patch, 3).swapaxes(1, 2)
        for piece in pieces
    ]
    flat = [each.reshape(-1, patch, patch, 3) for each in patches]
    flat.append(np.zeros((-sum(map(len, flat)) % across, patch, patch, 3), np.uint8))
    cells = np.concatenate(flat).reshape(-1, across, patch, patch, 3)
    return cells.swapaxes(1, 2).reshape(-1, across * patch, 3)
