"""How many positions Moonshine's encoder gives of a recording, whose samples pass three convolutions."""

from __future__ import annotations

from models.media.whisper import PIECE_FRAMES, STEP

CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))
"""How many numbers each reads for one that it gives, and how far these begin apart."""
MOST_SAMPLES = PIECE_FRAMES * STEP
"""The samples of the longest piece that is read at once: 30 seconds."""


def positions_of(samples: int) -> int:
    """The positions of a recording, behind which there is silence if it is too short for one."""
    for width, stride in CONVOLUTIONS:
        samples = (samples - width) // stride + 1
    return max(1, samples)


def samples_of(positions: int) -> int:
    """The fewest samples of a recording with so many positions."""
    for width, stride in reversed(CONVOLUTIONS):
        positions = (positions - 1) * stride + width
    return positions
