"""Computes the memory that a tower takes, and which tokens see each other across media."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from models.config import ModelConfig
from models.layers.embedding import TokenEmbedding
from models.layers.linear import Linear
from models.model import ServedModel
from models.towers.tower import Tower, sees_media, sees_prompts
from worker.capacity import GIB, CacheBudget
from worker.config import WorkerConfig

MOST_PATCHES = 1 << 14
"""The patches that are encoded together, unless a single item has more."""
_KEPT_PART, _MOST_KEPT = 8, 4 * GIB
"""By default embeddings are kept in one part of so many of the memory for caches, and in so many bytes at
most."""


def check_takes_rows(model: ServedModel, tower: Tower | None, config: WorkerConfig) -> None:
    """Raise ValueError if prompts of the model cannot be embeddings."""
    own = [module for module in model.modules() if isinstance(module, TokenEmbedding)]
    takes = bool(own) and all(module.size == config.model.hidden_size for module in own)
    reads_ids = bool(config.model.raw.get("hidden_size_per_layer_input"))
    sees = sees_media(tower) or sees_prompts(tower) or getattr(tower, "three_axes", False)
    if reads_ids or sees or not model.causal or (config.place.stage == 0 and not takes):
        raise ValueError(
            "--enable-prompt-embeds: this model reads more of a prompt than embeddings, such as its ids"
            + (" or where pictures are: give --language-model-only too" if sees else "")
        )


def media_bytes(tower: Tower, model: ModelConfig, most: int, dtype: torch.dtype) -> int:
    """An upper bound of the bytes of `most` embeddings and of the tower's largest step, by shapes alone."""
    vision = (model.whole or model.raw).get("vision_config")
    fields = cast("dict[str, object]", vision) if isinstance(vision, dict) else {}
    merged = fields.get("spatial_merge_size")  # where pictures keep their size, one may have all embeddings
    patches = max(MOST_PATCHES, most * merged**2 if isinstance(merged, int) else 0)
    layers = [module for module in cast("nn.Module", tower).modules() if isinstance(module, Linear)]
    widest = max((sum(layer.widths) for layer in layers), default=0)
    return most * row_bytes(tower, model, dtype) + 4 * patches * widest * dtype.itemsize


def row_bytes(tower: Tower | None, model: ModelConfig, dtype: torch.dtype) -> int:
    """The bytes of an embedding, with those of the rows that are added behind deeper layers."""
    return (1 + (tower.levels if tower else 0)) * model.hidden_size * dtype.itemsize


def kept_bytes(asked: float | None, budget: CacheBudget) -> int:
    """The bytes of embeddings that are kept for later requests. Raises ValueError if so many are not there.

    `asked`: the GiB that the operator asks for, if so.
    """
    if asked is None:
        return min(budget.nbytes // _KEPT_PART, _MOST_KEPT)
    nbytes = int(asked * GIB)
    if nbytes > budget.most:
        raise ValueError(
            f"--mm-encoder-cache-gb asks for {asked:g} GiB of embeddings of pictures, and there are "
            f"{budget.most / GIB:.2f} GiB of memory beside the weights: lower it"
        )
    return nbytes
