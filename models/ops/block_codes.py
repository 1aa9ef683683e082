"""Codes of weights that lie in blocks of bytes, as in GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BYTES = 1 << 19
"""The bytes of blocks that are taken apart at a time: in the caches this takes half the time, or less."""


@dataclass(frozen=True, slots=True)
class BitPlane:
    """The bytes of a block that hold some bits of all its codes.

    Of each `span` bytes the lowest `bits` belong to as many codes, and the next ones to the codes behind.
    """

    place: int
    """The first of the bytes."""
    bits: int
    span: int


def split_blocks(blocks: Tensor, count: int, planes: Sequence[BitPlane], flipped: int = 0) -> Tensor:
    """uint8 [N, blocks, bytes] -> uint8 [N, blocks * count]: the `count` codes of each block.

    The first of `planes` holds the lowest bits of each code, the next one those above. `flipped`: bits of
    codes that are stored the other way round.
    """
    rows = max(1, _BYTES // max(1, blocks[:1].numel()))
    return torch.cat([_split(some, count, planes, flipped) for some in blocks.split(rows)])


def _split(blocks: Tensor, count: int, planes: Sequence[BitPlane], flipped: int) -> Tensor:
    codes, above = blocks.new_full((*blocks.shape[:2], count), flipped), 0
    for plane in planes:
        stored = blocks[..., plane.place : plane.place + count * plane.bits // 8]
        shifts = torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
        bits = stored.unflatten(-1, (-1, 1, plane.span)) >> shifts & ((1 << plane.bits) - 1)
        codes ^= bits.flatten(-3) << above
        above += plane.bits
    return codes.flatten(1)
