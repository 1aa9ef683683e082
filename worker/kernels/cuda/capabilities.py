"""The limits of a card and the sizes of tiles for it, by its compute capability.

Sizes are chosen here once, by card, number type and width of heads, and never tried at run time: the largest
that Triton 3.7 compiles for each capability without spilling registers in loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEAST_E4M3 = 89
"""The first capability whose matrix unit multiplies numbers of 8 bits in e4m3."""

LEAST_BFLOAT16 = 80

_WIDE = ("Gemma", "T5", "Glm4")
"""Architectures whose hidden states pass what float16 holds, by how their names begin."""


def short_dtype(architecture: str, *, pools: bool, capability: int) -> str:
    """The type of 16 bits for a checkpoint in float32: the matrix unit is ten times as fast, and memory half.

    Vectors keep three bits more in float16; answers are written in bfloat16, whose range is that of float32.
    """
    fits = pools and not architecture.startswith(_WIDE)
    return "float16" if fits or capability < LEAST_BFLOAT16 else "bfloat16"


@dataclass(frozen=True, slots=True)
class Card:
    capability: int
    """The compute capability as one number: 90 for 9.0."""
    processors: int
    """The number of multiprocessors."""
    scaled_mm: bool = True
    """Whether torch's products of numbers of 8 bits are right on this card, if it has any."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether torch multiplies numbers in e4m3 on this card."""
        return self.scaled_mm and self.capability >= LEAST_E4M3

    @classmethod
    def of(cls, target: torch.device) -> Card:
        found = torch.cuda.get_device_properties(target)
        return cls(10 * found.major + found.minor, found.multi_processor_count)


HOPPER, BLACKWELL = 90, 100
"""Capabilities whose matrix units read from shared memory, of which they have 227 KiB."""

SHORT_ROWS = 16
"""The least rows of a tile in which the matrix unit works: a block of decoding tokens has so many."""


LEAST_KEYS = 256
"""The keys of a split, at least: fewer are read sooner than results are joined."""

LEAST_MADE = 128
"""The tokens of a prompt from which on keys and values are made of its latents: fewer do not pay for that
beside rows that read latents themselves."""


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


def has_large(capability: int) -> bool:
    """Whether its matrix unit reads large tiles from shared memory."""
    return capability == HOPPER or _is_blackwell(capability)


def attention_tiles(capability: int, dtype: torch.dtype, dim: int, group: int, *, short: bool) -> Tiles:
    """The tiles for heads of `dim` numbers, `group` of which share a key head.

    `short`: the block of queries holds decoding tokens or a few more, whose keys are split.
    """
    least = 1 << (group - 1).bit_length()  # one token's heads fit
    if dim > 256:
        tiles = _wide(dtype, short=short)
    elif short:
        tiles = _short(capability, dtype, dim)
    elif dtype == torch.float32:
        tiles = Tiles(32, 32, 4, 1 if dim > 128 else 2)
    elif has_large(capability):
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
        return Tiles(64, 64 if _is_blackwell(capability) else 32, 8, 2)  # fewer keys spill registers there
    if capability == HOPPER and dim > 64:
        return Tiles(128, 128, 8, 2)  # an H100 made 395 TFLOP/s of them, and 360 of the size below
    return Tiles(128, 64, 8, 2 if _is_blackwell(capability) and dim <= 64 else 3)


def _wide(dtype: torch.dtype, *, short: bool) -> Tiles:
    """The tiles for heads of up to 512 numbers, of which a few fill the registers, on every card."""
    if dtype == torch.float32:
        return Tiles(SHORT_ROWS, 16, 8, 1)
    return Tiles(SHORT_ROWS, 16, 4, 2) if short else Tiles(2 * SHORT_ROWS, 16, 8, 2)


def latent_heads(capability: int, dtype: torch.dtype) -> int:
    """The most heads that read a latent together, as many as a tile has rows; a power of two."""
    if dtype == torch.float32:
        return SHORT_ROWS
    return 4 * SHORT_ROWS if has_large(capability) else 2 * SHORT_ROWS


def latent_tiles(capability: int, dtype: torch.dtype, group: int, *, short: bool) -> Tiles:
    """The tiles for latent attention, `group` heads of which read together: latents fill the registers."""
    if dtype == torch.float32:
        return Tiles(SHORT_ROWS, 16, 8, 1)
    if group <= SHORT_ROWS and short:
        return Tiles(SHORT_ROWS, 32, 4, 2)
    if has_large(capability) and (group > 2 * SHORT_ROWS or not short):
        return Tiles(4 * SHORT_ROWS, 32, 8, 3 if capability == HOPPER else 2)
    return Tiles(2 * SHORT_ROWS, 32, 8, 2)


def made_tiles(capability: int, dtype: torch.dtype, dim: int) -> Tiles:
    """The tiles for prompts whose keys and values are made of latents, of up to `dim` numbers."""
    if capability == HOPPER and 64 < dim <= 128 and dtype != torch.float32:
        return Tiles(128, 64, 8, 3)  # what is rotated leaves no registers for 128 keys
    return attention_tiles(capability, dtype, dim, 1, short=False)


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The sizes of a tile of a product, whose inputs the form of the matrix decides."""

    outputs: int
    rows: int
    warps: int
    stages: int
    inputs: int = 0
    """The inputs of a tile; 0: as many as the form of the matrix says."""


FEW_ROWS = 16
"""Rows up to which a product takes its narrowest tile."""
MANY_ROWS = 128
"""Rows from which on a matrix is widened once: a product takes longer than that."""


def product_tiles(dtype: torch.dtype, rows: int, tile_bytes: int) -> ProductTiles:
    """The tiles for products of so many rows with a matrix that our own kernel reads, by the bytes that a
    tile has of an output: with 64, twice as many outputs took an H100 0.82 of the time from 17 rows on."""
    if dtype == torch.float32:
        return ProductTiles(32, 16, 4, 2)
    if rows <= FEW_ROWS:
        return ProductTiles(64, 16, 4, 4)
    return ProductTiles(128, 64, 8, 3) if tile_bytes == 64 else ProductTiles(64, 64, 4, 3)


def expert_tiles(dtype: torch.dtype, rows: int, *, plain: bool) -> ProductTiles:
    """The tiles for products of experts that have so many rows each on the average.

    The pairs of a few tokens take as long as matrices are read: by many narrow programs, which are spread
    evenly, and with much on its way in each. Those of a prompt take as long as tiles come from the cache.
    """
    if dtype == torch.float32:
        return ProductTiles(32, 16, 4, 2)
    if rows <= FEW_ROWS:
        return ProductTiles(32, 16, 2, 4, inputs=128) if plain else ProductTiles(64, 16, 4, 4)
    return ProductTiles(128, 128 if plain and rows > MANY_ROWS else 64, 8, 3)


JOINED_ROWS = 8
"""The most rows of steps whose operations are joined: as many as the matrix unit takes at least."""
COUNTERS = 1 << 13
"""The counters of joined kernels: one for each tile of outputs, or key head of a block of queries."""


def joined_tiles(dtype: torch.dtype) -> ProductTiles:
    """The tiles of products that are joined with what is before and behind them: those of experts of few
    rows, which read matrices at 0.92 of the speed of an H100's memory."""
    if dtype == torch.float32:
        return ProductTiles(32, JOINED_ROWS, 4, 2, inputs=32)
    return ProductTiles(32, JOINED_ROWS, 2, 4, inputs=128)
