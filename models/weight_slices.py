"""Pieces of stored matrices, as ranks read them, and the error of weights that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class WeightsError(ValueError):
    """The checkpoint's weights cannot be used; the message names file, tensor and reason."""


DAMAGED = "download it again, or use another checkpoint of the model"
"""What to do about a file whose numbers cannot be meant."""


@dataclass(frozen=True)
class Cut:
    """The piece [start, stop) along one of the two dimensions of a matrix, or along a vector."""

    dim: int
    start: int
    stop: int
    member: int | None = None
    """The number of a matrix in a stack of them [members, rows, columns], of which this is a piece."""

    def of(self, tensor: Any) -> Tensor:
        """Cut the piece out of a tensor, or out of a slice of safetensors, which reads no more than that."""
        if self.member is not None:
            if self.dim == 0:
                return tensor[self.member, self.start : self.stop]
            return tensor[self.member, :, self.start : self.stop]
        return tensor[self.start : self.stop] if self.dim == 0 else tensor[:, self.start : self.stop]

    def shape_of(self, shape: Sequence[int]) -> list[int]:
        """The shape of this piece of a tensor."""
        size = list(shape if self.member is None else shape[1:])
        size[self.dim] = self.stop - self.start
        return size
