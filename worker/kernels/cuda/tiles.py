"""The sizes of tiles by card, number type and width of heads: chosen here once, and never tried at run time.

They are the largest that Triton 3.7 compiles for each capability without spilling registers in loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HOPPER, BLACKWELL = 90, 100
"""Capabilities whose matrix units read from shared memory, of which they have 227 KiB."""

SHORT_ROWS = 16
"""The least rows of a tile in which the matrix unit works: a block of decoding tokens has so many."""


LEAST_KEYS = 256
"""The keys of a split, at least: fewer are read sooner than results are joined."""


@dataclass(frozen=True, slots=True)
class Tiles:
    queries: int
    """Rows of a block of queries: tokens times the query heads that share a key head."""
    keys: int
    warps: int
    stages: int


def _is_blackwell(capability: int) -> bool:
    """Whether it is 10.0 or one of its kin, such as 10.3, whose kernels need as much room."""
    return capability // 10 == BLACKWELL // 10


def _has_large(capability: int) -> bool:
    return capability == HOPPER or _is_blackwell(capability)


def attention_tiles(capability: int, dtype: torch.dtype, dim: int, group: int, *, short: bool) -> Tiles:
    """The tiles for heads of `dim` numbers, `group` of which share a key head.

    `short`: the block of queries holds decoding tokens or a few more, whose keys are split.
    """
    least = 1 << (group - 1).bit_length()  # one token's heads fit
    if short:
        tiles = _short(capability, dtype, dim)
    elif dtype == torch.float32:
        tiles = Tiles(32, 32, 4, 1 if dim > 128 else 2)
    elif _has_large(capability):
        tiles = _large(capability, dim)
    else:
        tiles = Tiles(128, 32, 8, 3) if dim <= 128 else Tiles(64, 32, 8, 2)
    return Tiles(max(tiles.queries, least), tiles.keys, tiles.warps, tiles.stages)


def _short(capability: int, dtype: torch.dtype, dim: int) -> Tiles:
    if dtype == torch.float32:
        return Tiles(SHORT_ROWS, 32, 4, 1 if dim > 128 else 2)
    if dim > 128:
        return Tiles(SHORT_ROWS, 32, 4, 2)
    return Tiles(SHORT_ROWS, 64, 8 if capability == HOPPER and dim <= 64 else 4, 3)


def _large(capability: int, dim: int) -> Tiles:
    if dim > 128:
        return Tiles(64, 32, 8, 2)
    return Tiles(128, 64, 8, 2 if _is_blackwell(capability) and dim <= 64 else 3)


def latent_tiles(dtype: torch.dtype, *, short: bool) -> Tiles:
    """The tiles for latent attention on every card: whole latents of queries fill the registers."""
    if dtype == torch.float32:
        return Tiles(SHORT_ROWS, 16, 8, 1)
    return Tiles(SHORT_ROWS, 32, 4, 2) if short else Tiles(2 * SHORT_ROWS, 32, 8, 2)


def made_tiles(capability: int, dtype: torch.dtype, widest: int) -> Tiles:
    """The tiles for prompts of latent attention whose keys and values are made, of up to `widest` numbers."""
    if dtype == torch.float32:
        return Tiles(32, 16, 8, 1)
    if _has_large(capability):
        return Tiles(128, 64, 8, 2) if widest <= 128 else Tiles(64, 64, 8, 2)
    return Tiles(64, 32, 4 if widest <= 128 else 8, 2)


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The sizes of a tile of a product, whose inputs the form of the matrix decides."""

    outputs: int
    rows: int
    warps: int
    stages: int


def rounded_tiles(capability: int) -> ProductTiles:
    """The tiles for products of many rows with both sides in e4m3."""
    return ProductTiles(64 if _is_blackwell(capability) else 128, 128, 8, 3)


FEW_ROWS = 16
"""Rows up to which a product takes its narrowest tile."""
MANY_ROWS = 128
"""Rows from which on a matrix is widened once, or inputs are rounded: a product takes longer than either."""


def product_tiles(dtype: torch.dtype, rows: int) -> ProductTiles:
    """The tiles for products of so many rows with a matrix that our own kernel reads."""
    if dtype == torch.float32:
        return ProductTiles(32, 16, 4, 2)
    return ProductTiles(64, 16 if rows <= FEW_ROWS else 64, 4, 4 if rows <= FEW_ROWS else 3)
