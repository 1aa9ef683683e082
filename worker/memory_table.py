"""Divides the memory of a device: one table of what each part of a worker takes.

A step takes its bytes first. Features decide, one after the other, what they take of the memory for caches,
by which sizes of steps may become smaller; the KV cache gets the rest. Nothing is measured by running.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torch import Tensor

from worker.cache.cache_groups import CacheLayout, lay_out_cache
from worker.cache.kv_cache_size import Cache, bytes_beside_cache, describe_small_cache, no_cache, size_cache
from worker.capacity import GIB, CacheBudget, WorkerLimits
from worker.devices.dtype_choice import dtype_name
from worker.host.memory import Pages
from worker.limits import fit_whole_sequences, take_less
from worker.model_loading import Loaded, steps_behind
from worker.steps.feature import Hooks
from worker.tables.slots import Slots
from worker.tables.staging import Staging
from worker.worker_facts import WorkerFacts, blocks_held

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a worker, divided."""

    limits: WorkerLimits
    layout: CacheLayout
    cache: Cache
    weight_bytes: int
    step_bytes: int
    """The most bytes that a step takes beside weights and caches."""


def loaded_weights(loaded: Loaded, hooks: Hooks) -> list[Tensor]:
    """The weights of a model and of its features."""
    return [*loaded.model.parameters(), *(each for own in hooks.weights for each in own())]


def size_steps(loaded: Loaded, hooks: Hooks, limits: WorkerLimits) -> WorkerLimits:
    """Fit the sizes of steps to a loaded model, and make them smaller if memory has run out before."""
    config, minimum = loaded.config, loaded.groups.minimum
    if whole := not loaded.model.causal or any(reads_whole() for reads_whole in hooks.reads_whole):
        limits = fit_whole_sequences(limits, config)
    return take_less(limits, config, minimum, whole=whole)


def divide_memory(loaded: Loaded, hooks: Hooks, limits: WorkerLimits, weights: list[Tensor]) -> Memory:
    """Give each part its memory, and log the table."""
    model, options, device = loaded.model, loaded.config.options, loaded.device
    layers = [*model.attention_layers(), *(each for own in hooks.attention_layers for each in own())]
    # Where all positions are stored or seen, all blocks are kept.
    keeps_all = any(each() for each in hooks.keeps_all_blocks) or options.disable_hybrid_kv_cache_manager
    layout = lay_out_cache(layers, limits, loaded.cache_dtype, loaded.groups.minimum, keeps_all=keeps_all)
    table, taken = {"weights": sum(weight.nbytes for weight in weights)}, 0

    def step_bytes(limits: WorkerLimits) -> int:
        given = loaded.config, limits, device, layers, loaded.dtype, loaded.tasks, len(layout.groups)
        return bytes_beside_cache(*given) + sum(each(limits) for each in hooks.step_bytes)

    def budget(limits: WorkerLimits) -> CacheBudget:
        return device.cache_budget(options.gpu_memory_utilization, step_bytes(limits)).less(taken)

    for take in hooks.take:
        part = take(limits, budget(limits))
        limits, taken = part.limits, taken + part.nbytes
        table[part.name] = part.nbytes
    cache = _make_cache(loaded, hooks, limits, layout, budget(limits))
    limits = replace(limits, max_model_len=cache.size.max_model_len)
    step = step_bytes(limits)
    table |= {"KV cache": cache.size.num_blocks * cache.size.block_bytes, "step buffers, up to": step}
    if loaded.config.place.rank == 0:
        sizes = [f"{name} {_size(nbytes)}" for name, nbytes in table.items() if nbytes]
        logger.info("memory: %s", "; ".join(sizes))
    return Memory(limits, layout, cache, table["weights"], step)


def open_memory(memory: Memory, loaded: Loaded, hooks: Hooks) -> tuple[Slots, Cache, Staging]:
    """Make the tables of slots and the ring of packets, and have features take their memory."""
    limits, cache, device = memory.limits, memory.cache, loaded.device
    sizes = limits.max_num_seqs, limits.max_model_len, limits.block_size
    slots = Slots(device.target, *sizes, paged=loaded.model.causal, shares=memory.layout.shares)
    given = limits, slots, cache.size.num_blocks
    kept = [part for take_memory in hooks.open for part in take_memory(*given)]
    staging = Staging(device.staging_buffer, steps_behind(loaded.config), limits.staged_words)
    return slots, replace(cache, parts=[*cache.parts, *kept]), staging


def tell_facts(memory: Memory, loaded: Loaded, hooks: Hooks, fingerprint: str) -> WorkerFacts:
    """Tell the engine what was loaded, and with which sizes."""
    limits, size = memory.limits, memory.cache.size
    facts = WorkerFacts(
        device=loaded.device.name,
        dtype=dtype_name(loaded.dtype),
        block_size=limits.block_size,
        num_blocks=size.num_blocks,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        weight_bytes=memory.weight_bytes,
        kv_bytes=size.num_blocks * size.block_bytes,
        mapped_bytes=loaded.device.mapped_bytes,
        device_bytes=loaded.device.held_bytes(memory.step_bytes),
        tasks=loaded.tasks,
        windows=memory.layout.windows,
        causal=loaded.model.causal,
        fingerprint=fingerprint,
    )
    for add_facts in hooks.add_facts:
        facts = add_facts(facts)
    return facts


def _make_cache(
    loaded: Loaded, hooks: Hooks, limits: WorkerLimits, layout: CacheLayout, budget: CacheBudget
) -> Cache:
    """Make the cache within `budget`, in which features find what they keep of each block."""
    model, device = loaded.model, loaded.device
    if not model.causal:
        return no_cache(limits.max_model_len)
    sizes = limits.max_model_len, limits.max_num_batched_tokens, limits.block_size
    longest = blocks_held(*sizes, layout.windows)
    each = layout.block_bytes + sum(block_bytes(longest) for block_bytes in hooks.block_bytes)
    minimum, windows = loaded.groups.minimum, layout.windows
    size = size_cache(loaded.config, limits, each, budget, minimum, limits.kills, windows)
    if loaded.config.place.rank == 0 and (
        line := describe_small_cache(model.attention_layers(), layout.dtype)
    ):
        logger.info("%s", line)
    parts = layout.bind(size.num_blocks + 1, device)
    return Cache(size, device.pages(parts, size.num_blocks) if parts else Pages(), parts)


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB // 10 else f"{nbytes / (1 << 20):.1f} MiB"
