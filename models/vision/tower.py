"""The contract between a tower and the models that it is put into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from models.media.files import PictureSettings
from models.media.item import Kind


@dataclass(frozen=True, slots=True)
class TowerInput:
    """A media item as it was prepared (`models.media.item.Prepared`), on the device."""

    kind: Kind
    pixels: Tensor  # [height, width, 3] uint8; tiles and frames stand below each other
    grid: tuple[int, int, int]
    """The frames, and the rows and columns of patches in each, before any of them are merged."""
    embeddings: int


@dataclass(frozen=True, kw_only=True)
class TowerSetup:
    """The one argument of a tower's class."""

    config: Mapping[str, Any]
    """config.json, whole."""
    pictures: PictureSettings
    """How pixels are normalised, which is the tower's first operation."""
    hidden_size: int
    """The width of the text's embeddings."""
    dtype: torch.dtype


class Tower(Protocol):
    """A module that `models.checkpoint.weights.load` fills. Every rank of the first stage has it whole.

    Where tokens have positions on three axes (`models.media.positions`), its class has `three_axes = True`;
    where those of an item see each other, `sees_media = True`, and where those of a whole prompt do, with or
    without pictures, `sees_prompt = True`, too.
    """

    levels: int
    """The number of layers of the text behind which further rows are added; 0 for most towers."""

    def encode(self, items: Sequence[TowerInput]) -> list[Tensor]:
        """For each item its rows [embeddings, (1 + levels) * hidden_size], of the tower's type of numbers.

        The items are computed together, and each gives the same bits alone and beside any others.
        """
        ...
