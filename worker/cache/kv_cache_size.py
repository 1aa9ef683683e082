"""The paged KV cache: how many blocks there are, and the memory behind them. Nothing is measured by running.

All blocks lie in one tensor, in the shapes that attention layers say, and every layer is bound to its part
(`cache_groups.py`). One block more than the engine knows belongs to the worker as scratch: keys and values
that are written there are never read.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.config import ModelConfig
from models.layers.attention import Attention, CachedAttention
from models.ops.attention_inputs import CODES
from worker.capacity import GIB, CacheBudget, WorkerLimits
from worker.config import Place, WorkerConfig
from worker.devices.base import Device
from worker.host.memory import Pages
from worker.options import WorkerOptions
from worker.sampling.grouped_logits import WORKSPACE
from worker.tables.slots import Slots
from worker.tasks import samples
from worker.worker_facts import blocks_held

logger = logging.getLogger(__name__)

_MOST_EMPTY_BLOCKS = 1 << 17
"""The most blocks of a model without attention: each takes some memory of the engine."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    num_blocks: int
    """Blocks that the engine may use; the scratch block comes after them."""
    block_bytes: int
    """Bytes of a block in all layers together, and of what features keep of it."""
    max_model_len: int
    """The length that was asked for, or as much of the model's as fits."""


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache of one rank. The attention layers hold keys and values themselves."""

    size: CacheSize
    pages: Pages = field(default_factory=Pages)
    parts: Sequence[Tensor] = ()
    """All memory of blocks, contiguous parts [blocks, ...] of keys, values, and what features keep."""

    def make_pages(self, blocks: int) -> None:
        """Return when the first `blocks` have pages, which some devices make when they are first written."""
        self.pages.make(blocks)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, all of which are read before any is written."""
        numbers = torch.tensor(pairs)  # [pairs, 2]
        for part in self.parts:
            numbers = numbers.to(part.device, non_blocking=True)
            rows = part.reshape(len(part), -1).view(torch.uint8)
            rows.index_copy_(0, numbers[:, 1], rows.index_select(0, numbers[:, 0]))

    @property
    def pieces(self) -> list[NDArray[np.uint8]]:
        """All that is kept of blocks, in the host's memory: for each part the bytes [blocks, bytes]."""
        return [part.reshape(len(part), -1).view(torch.uint8).numpy() for part in self.parts]


def no_cache(max_model_len: int) -> Cache:
    """The cache of a model that computes each sequence whole: it has no blocks."""
    return Cache(CacheSize(0, 0, max_model_len))


def size_cache(
    config: WorkerConfig,
    limits: WorkerLimits,
    block_bytes: int,
    budget: CacheBudget,
    minimum: Callable[[int], int] = int,
    halvings: int = 0,
    windows: Sequence[int] = (0,),
) -> CacheSize:
    """The number of blocks that `budget` or an option gives, up to what all slots can fill.

    A model that only pools has no streams to hold: it needs room for the texts of the steps under way.

    `minimum`: that of all ranks' numbers, for all must have room for the same sequences. `halvings`: how
    often the cache has turned out to be too large. `windows`: those of `WorkerFacts`.
    """
    asked, step = config.options, limits.max_num_batched_tokens

    def held(tokens: int, step: int = step) -> int:
        return blocks_held(tokens, step, limits.block_size, windows)

    per_sequence = held(limits.max_model_len)
    nbytes, flag = _asked_bytes(asked, block_bytes, budget)
    filled = limits.max_num_seqs * held(limits.max_model_len, 1)  # all slots, and what one step adds to that
    filled += sum(map(bool, windows)) * -(-step // limits.block_size)
    if config.conversion.runner == "pooling" and asked.kv_cache_memory_bytes is None:
        texts = len(windows) * (-(-step // limits.block_size) + limits.max_num_seqs)
        filled = min(filled, (1 + config.steps_ahead) * texts + per_sequence)  # of steps, and one that is cut
    if minimum(-block_bytes) == 0:  # no rank caches anything: blocks are names of prefixes only
        filled = min(filled, max(per_sequence, _MOST_EMPTY_BLOCKS))
    most = asked.num_gpu_blocks_override or filled
    blocks = (
        min(most, nbytes // block_bytes) if block_bytes else most
    )  # a stage may have no layer that caches
    blocks = _halved(minimum(blocks), halvings, per_sequence, block_bytes)
    if blocks >= per_sequence:
        return CacheSize(blocks, block_bytes, limits.max_model_len)

    fits = bisect_right(range(limits.max_model_len), blocks, key=held) - 1
    shortage = (
        f"one sequence of {limits.max_model_len} tokens needs {_gib(per_sequence * block_bytes)} of KV cache "
        f"and {_gib(blocks * block_bytes)} are there"
    )
    if asked.max_model_len is not None or fits < 2:
        lower = f", or lower --max-model-len to {fits} at most" if fits >= 2 else ""
        raise ValueError(f"{shortage}: raise {flag}{lower}")
    logger.warning("%s: the longest sequence is now %d tokens; raise %s for more", shortage, fits, flag)
    return CacheSize(blocks, block_bytes, fits)


def _asked_bytes(asked: WorkerOptions, block_bytes: int, budget: CacheBudget) -> tuple[int, str]:
    """The bytes for the cache and the option that decides: what was asked for, if the device has so much."""
    if asked.num_gpu_blocks_override:
        nbytes, flag = asked.num_gpu_blocks_override * block_bytes, "--num-gpu-blocks-override"
    elif asked.kv_cache_memory_bytes is not None:
        nbytes, flag = asked.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    else:
        return budget.nbytes, budget.flag
    if nbytes > budget.most:
        raise ValueError(
            f"{flag} asks for {_gib(nbytes)} of KV cache, and there are {_gib(budget.most)} of memory beside "
            "the weights: lower it, or leave it out"
        )
    return nbytes, flag


def _halved(blocks: int, times: int, per_sequence: int, block_bytes: int) -> int:
    """Fewer blocks, but not fewer than one sequence needs if there were so many."""
    fewer = max(blocks >> times, min(blocks, per_sequence))
    if fewer < blocks:
        text = "workers killed before this one because memory ran out: %d; the KV cache has %s, not %s"
        logger.warning(text, times, _gib(fewer * block_bytes), _gib(blocks * block_bytes))
    return fewer


def describe_small_cache(layers: Sequence[CachedAttention], dtype: torch.dtype) -> str | None:
    """Say which scales a cache of 8 bits has, or that those of a checkpoint are not needed; None: neither."""
    scaled = sum(isinstance(layer, Attention) and layer.cache_scales is not None for layer in layers)
    cache = f"the KV cache is in {str(dtype).removeprefix('torch.')}"
    if dtype.itemsize > 1:
        return f"{cache}: the checkpoint's scales for fp8 are not used" if scaled else None
    if not layers:
        return None
    if dtype == CODES:
        return f"{cache}: each head of a token has a scale of its own"
    if not scaled:
        return f"{cache}: the checkpoint has no scales for it, so 1 is taken"
    return f"{cache}, by the checkpoint's scales in {scaled} of {len(layers)} layers"


def bytes_beside_cache(
    config: WorkerConfig,
    limits: WorkerLimits,
    device: Device,
    layers: Sequence[CachedAttention],
    dtype: torch.dtype,
    tasks: Sequence[str],
    groups: int = 1,
) -> int:
    """An upper bound of the bytes that steps take beside weights and cache, recorded ones among them."""
    model, place = config.model, config.place
    ranks, replicas = place.tensor_size, place.expert_replicas

    def attention(tokens: int) -> int:
        return device.attention_bytes(layers, tokens, limits.max_model_len, dtype)

    step = step_bytes(model, limits, dtype, place=place, groups=groups)
    step += attention(limits.max_num_batched_tokens)
    if replicas > 1:  # their steps are not recorded
        return step
    copies = 4 if ranks == 1 else 5  # logits, also in pieces of ranks; copies, to cap, mask and rank them
    return step + device.recording_bytes(
        limits.max_num_seqs,
        per_row=copies * 4 * model.vocab_size if samples(tasks) else 0,
        per_token=_token_numbers(model, ranks) * dtype.itemsize,
        attention=attention,
    )


def step_bytes(
    model: ModelConfig,
    limits: WorkerLimits,
    dtype: torch.dtype,
    *,
    place: Place,
    groups: int = 1,
) -> int:
    """An upper bound of the bytes that a step takes beside weights and cache, from the shapes alone.

    What attention needs depends on the device (`Device.attention_bytes`) and is not among them. The tokens of
    all replicas that share experts may come to this rank.
    """
    tokens = limits.max_num_batched_tokens * place.expert_replicas
    return (
        tokens * _token_numbers(model, place.tensor_size) * dtype.itemsize
        + 3 * 4 * limits.most_rows * model.vocab_size  # logits; two copies, to cap, mask and rank them
        + 6 * WORKSPACE
        + Slots.nbytes(limits.max_num_seqs, limits.max_model_len, limits.block_size, groups)
        + GIB // 2  # libraries' own workspaces and fragmentation
    )


def _token_numbers(model: ModelConfig, ranks: int) -> int:
    """The numbers of a token that a layer holds at the same time, those of attention left out."""
    inner = model.raw.get("intermediate_size")
    inner = inner if isinstance(inner, int) else 4 * model.hidden_size
    streams = model.raw.get("altup_num_inputs")
    streams = streams if isinstance(streams, int) else 1
    return 4 * streams * model.hidden_size + 4 * -(-inner // ranks)


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 100 else f"{nbytes / (1 << 20):.2f} MiB"
