"""Measures the memory that each of several models takes, of the machine or of its cards.

A process on a CPU is measured. What one takes of a card is computed by its worker, which divides the card's
memory before it loads anything into it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol

from engine_core.config import EngineConfig
from engine_core.stalls import descendants
from server.options.model_list import uses_cards
from server.options.server_flags import ServerConfig
from worker.host.machine import own_memory, total_memory
from worker.host.nvidia import card_memory
from worker.worker_facts import WorkerFacts

OVERHEAD, CARD_OVERHEAD = 100 << 20, 2 << 30
"""Bytes that a worker takes beside weights and caches, before one of the model has told: of the machine's
memory, and of a card's, where it has a context of the driver and graphs."""
_SHARE, _CARD_SHARE = 0.8, 0.92
"""The parts of the machine's memory and of a card's that are for models by default."""
_CACHE_PART, _MOST_CACHE = 8, 4 << 30
"""The caches of a model take this part of the memory for all, and on a CPU so many bytes at most."""
_UNTOUCHED = 7 / 8
"""The part of a cache that has no pages yet when a model is ready."""


class ModelMemory(Protocol):
    budget: int
    """The bytes for all models together."""
    most_cache_bytes: int
    """The most bytes of the caches of a model whose options do not say how many."""

    def estimate(self, weights: int, engine: EngineConfig, *, replicas: int, filled: int) -> int:
        """The bytes that a model with so many of weights in its files will take.

        `filled`: the most bytes of cache that it could fill, 0 if it has none.
        """
        ...

    def of_loaded(self, facts: WorkerFacts, engine: EngineConfig, replicas: int, pids: Sequence[int]) -> int:
        """The bytes that a model takes at most whose engines are these processes. May take milliseconds."""
        ...

    def measure(self, models: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        """The bytes that all but models take now, and those of each model, by the processes of its engines.

        May take milliseconds.
        """
        ...


def open_memory(config: ServerConfig) -> ModelMemory:
    """The memory that the models of this server share. Raises OSError if a card does not tell its own."""
    if uses_cards(config):
        return CardMemory(_CARD_SHARE if config.memory is None else config.memory)
    return HostMemory(_SHARE if config.memory is None else config.memory)


def budget_for(needed: int, budget: int) -> int:
    """The budget that is enough for what needs so much within this one: with it caches grow as well."""
    return (needed - budget // _CACHE_PART) * _CACHE_PART // (_CACHE_PART - 1)


class HostMemory:
    """The memory of all processes of the server, each of which has its part of what it shares."""

    def __init__(self, asked: float) -> None:
        """`asked`: bytes, or a share of what the machine or container has, up to 1."""
        self.budget = int(asked * total_memory()) if asked <= 1 else int(asked)
        self.most_cache_bytes = min(_MOST_CACHE, self.budget // _CACHE_PART)

    def estimate(self, weights: int, engine: EngineConfig, *, replicas: int, filled: int) -> int:
        each = weights + OVERHEAD * engine.ranks
        asked, share = engine.worker.kv_cache_memory_bytes, engine.worker.gpu_memory_utilization
        most = self.most_cache_bytes if asked is None else asked * engine.ranks
        if share is not None and asked is None:
            most = max(0, int(share * total_memory()) - weights)
        return replicas * (each + min(filled, most))

    def of_loaded(self, facts: WorkerFacts, engine: EngineConfig, replicas: int, pids: Sequence[int]) -> int:
        computed = replicas * (facts.weight_bytes + facts.kv_bytes + OVERHEAD * engine.ranks)
        measured = sum(map(own_memory, _with_workers(pids)))
        if replicas > 1 or not measured:  # others are not ready yet
            return computed
        return measured + int(_UNTOUCHED * facts.kv_bytes)

    def measure(self, models: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        supervisor = os.getppid()
        sizes = {pid: own_memory(pid) for pid in (supervisor, *descendants(supervisor))}
        own = [sum(sizes.pop(pid, 0) for pid in _with_workers(pids)) for pids in models]
        return sum(sizes.values()), own


class CardMemory:
    """The memory of a card. A model takes a part of as many cards as it has workers, from the first one on.

    So no card has more of models than the first, which is counted.
    """

    def __init__(self, asked: float) -> None:
        """`asked`: bytes of each card, or a share of the smallest one, up to 1."""
        self.budget = int(asked * card_memory()) if asked <= 1 else int(asked)
        self.most_cache_bytes = self.budget // _CACHE_PART

    def estimate(self, weights: int, engine: EngineConfig, *, replicas: int, filled: int) -> int:
        each = weights // engine.ranks + CARD_OVERHEAD
        asked, share = engine.worker.kv_cache_memory_bytes, engine.worker.gpu_memory_utilization
        most = self.most_cache_bytes if asked is None else asked
        if share is not None and asked is None:
            most = max(0, int(share * card_memory()) - each)
        return each + min(filled // engine.ranks, most)

    def of_loaded(self, facts: WorkerFacts, engine: EngineConfig, replicas: int, pids: Sequence[int]) -> int:
        return facts.device_bytes

    def measure(self, models: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
        return 0, [0] * len(models)


def _with_workers(pids: Sequence[int]) -> Iterator[int]:
    """Processes of engines, and those of their workers."""
    for pid in pids:
        yield pid
        yield from descendants(pid)
