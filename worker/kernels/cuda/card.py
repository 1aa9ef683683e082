"""What kernels must know of the card that they run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""Shared memory of a block of threads, by compute capability."""

PROCESSORS = (14, 192)
"""The multiprocessors of the smallest and of the largest card, with some to spare."""

LEAST_E4M3 = 89
"""The first capability whose matrix unit multiplies numbers of 8 bits in e4m3."""


@dataclass(frozen=True, slots=True)
class Card:
    capability: int
    """The compute capability as one number: 90 for 9.0."""
    processors: int
    """The number of multiprocessors."""
    scaled_mm: bool = True
    """Whether torch's own products of numbers of 8 bits are right on this card."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether the matrix unit multiplies numbers in e4m3."""
        return self.capability >= LEAST_E4M3

    @classmethod
    def of(cls, target: torch.device) -> Card:
        found = torch.cuda.get_device_properties(target)
        return cls(10 * found.major + found.minor, found.multi_processor_count)
