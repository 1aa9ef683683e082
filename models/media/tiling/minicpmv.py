"""MiniCPM-V: the whole picture, then slices of it, all of which the tower takes in sizes of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from models.composites import minicpmv_version
from models.media.files import (
    HALF_PIXELS,
    MediaFiles,
    PictureSettings,
    Side,
    read_facts,
    read_settings,
    with_settings,
)
from models.media.item import ORDINAL, Layout, Picture, Prepared, interleaved
from models.media.resize import check_ratio

_DEFAULTS = {"MiniCPMVImageProcessor": {"resample": 3, **HALF_PIXELS}}
_NAMES = {"norm_mean": "image_mean", "norm_std": "image_std"}
"""What the authors call settings that all families have."""


class MiniCPMVSettings(PictureSettings, frozen=True, kw_only=True):
    max_slice_nums: Annotated[int, msgspec.Meta(ge=1, le=14)] = 9
    scale_resolution: Side = 448
    """The side of a square with as many pixels as the whole picture and each slice have, about."""
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
        pieces, grid = [slices_of(whole, self._patch, 1, 1)], (1, whole.height, whole.width)
        if slices:
            part = max(1, round(picture.width / columns)), max(1, round(picture.height / rows))
            width, height = self._size(*part, enlarge=True)
            enlarged = picture.resize((columns * width, rows * height), resample)
            pieces.append(slices_of(enlarged, self._patch, rows, columns))
            grid = (rows, enlarged.height, enlarged.width)
        pixels = joined(pieces)
        return Prepared(
            kind="image",
            pixels=pixels.data.cast("B"),
            shape=(pixels.shape[0], pixels.shape[1], 3),
            grid=(grid[0], grid[1] // self._patch, grid[2] // self._patch),
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


def slices_of(picture: Picture, patch: int, rows: int, columns: int) -> np.ndarray:
    """The slices of a picture, as patches: rows and columns of slices, those of patches, and the pixels."""
    cells = np.asarray(picture).reshape(rows, -1, patch, columns, picture.width // columns // patch, patch, 3)
    return cells.transpose(0, 3, 1, 4, 2, 5, 6)


def joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """One picture, as wide as the first piece, of the patches of all pieces, row by row, in order. The first
    piece stays as it is; below it lie the patches of the others, and black where the last row ends."""
    across, patch = pieces[0].shape[3:5]
    counts = [math.prod(piece.shape[:4]) for piece in pieces]
    canvas = np.zeros((-(-sum(counts) // across), patch, across, patch, 3), np.uint8)
    cells, first = canvas.swapaxes(1, 2), 0
    for piece, count in zip(pieces, counts, strict=True):
        numbers = np.arange(first, first + count).reshape(piece.shape[:4])
        cells[numbers // across, numbers % across] = piece
        first += count
    return canvas.reshape(-1, across * patch, 3)
