"""Makes the cache of a rank: how many blocks it has, and the memory to which layers are bound.

Also the bytes that media, sources and embeddings of prompts take beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from models.layers.cross_attention import cross_layers
from models.model import ServedModel
from models.vision.model import Tower, find_tower
from worker.cache.cache_groups import CacheLayout
from worker.cache.kv_cache import Cache, describe_small_cache, size_cache
from worker.config import WorkerConfig
from worker.devices.base import CacheBudget, Device
from worker.disk.host_copies import MOST_STAGED
from worker.disk.opening import uses_host_memory
from worker.limits import WorkerLimits
from worker.media import media_bytes, row_bytes
from worker.pooling import HiddenStore
from worker.sources import block_bytes, count_blocks, encoder_bytes, find_source_model
from worker.worker_facts import blocks_held

logger = logging.getLogger(__name__)


def make_cache(
    config: WorkerConfig,
    limits: WorkerLimits,
    device: Device,
    model: ServedModel,
    layout: CacheLayout,
    budget: CacheBudget,
    dtype: torch.dtype,
    minimum: Callable[[int], int],
    *,
    stores_hidden: bool,
    beside: int,
) -> Cache:
    """Make a cache within `budget`. `beside`: the bytes that others keep for each block.

    Where there are sources, memory is divided as one longest sequence needs both kinds of blocks.
    """
    place, size = config.place, limits.block_size
    width = config.model.output_size if stores_hidden else 0
    beside += HiddenStore.block_bytes(size, width, dtype)
    whole = blocks_held(limits.max_model_len, limits.max_num_batched_tokens, size, layout.windows)
    of_source = count_blocks(find_source_model(model), size)
    source_bytes = block_bytes(model, size, layout.dtype)
    beside += -(-of_source * source_bytes // max(1, whole))
    sized = size_cache(
        config,
        limits,
        layout.block_bytes + beside,
        budget,
        minimum,
        limits.kills,
        layout.windows,
    )
    if place.rank == 0 and (line := describe_small_cache(model.attention_layers(), layout.dtype)):
        logger.info("%s", line)
    parts = layout.bind(sized.num_blocks + 1, device)
    hidden = HiddenStore(sized.num_blocks, size, width, dtype, device.allocate) if stores_hidden else None
    page_toucher = device.page_toucher(parts, sized.num_blocks) if parts else None
    source_blocks = max(of_source, sized.num_blocks * of_source // max(1, whole))
    of_sources = _bind_sources(model, source_blocks, limits, layout.dtype, device)
    source_toucher = device.page_toucher(of_sources, source_blocks) if of_sources else None
    stored = [*parts, *([hidden.blocks] if hidden else ())]
    return Cache(sized, hidden, page_toucher, stored, source_blocks, source_toucher)


def _bind_sources(
    model: ServedModel, blocks: int, limits: WorkerLimits, dtype: torch.dtype, device: Device
) -> list[Tensor]:
    """Give each layer of cross-attention its part of memory, and return the keys and the values of all
    [blocks + 1, ...]. The block behind those of sources is zero."""
    parts = list[Tensor]()
    for layer in cross_layers(model.modules()):
        shape = layer.cache_shape(blocks + 1, limits.block_size, dtype)
        layer.kv = device.allocate(prod(shape) * dtype.itemsize).view(dtype).view(shape)
        layer.kv[:, blocks] = 0
        parts += layer.kv
    return parts


def input_bytes(config: WorkerConfig, limits: WorkerLimits, model: ServedModel, dtype: torch.dtype) -> int:
    """An upper bound of the bytes that a step takes for sources, media and embeddings of prompts."""
    most = encoder_bytes(model, config.model, limits.max_num_batched_tokens, dtype)
    if (tower := _own_tower(config, model)) is not None:
        most += media_bytes(tower, config.model, limits.most_embeddings, dtype)
    elif config.options.enable_prompt_embeds:
        most += limits.most_embeddings * config.model.hidden_size * dtype.itemsize
    return most


def kept_bytes(
    config: WorkerConfig, limits: WorkerLimits, model: ServedModel, dtype: torch.dtype, device: Device
) -> int:
    """The bytes of embeddings of media that are kept for later requests, and those by which blocks and
    states go to the host's memory and come back."""
    tower = _own_tower(config, model)
    staged = 4 * MOST_STAGED if uses_host_memory(config.options, device.target.type) else 0
    kept = limits.kept_embeddings * row_bytes(tower, config.model, dtype) if tower is not None else 0
    return staged + kept


def _own_tower(config: WorkerConfig, model: ServedModel) -> Tower | None:
    """The tower of the model, if this rank computes it."""
    return find_tower(model) if config.place.stage == 0 else None
