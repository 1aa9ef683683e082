"""The memory of a worker is divided by one table: features take theirs in turn, and what is left is told."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sizes import worker_config

from worker.capacity import CacheBudget, WorkerLimits
from worker.devices.cpu import Cpu
from worker.memory_table import divide_memory
from worker.ranks.process_groups import Groups
from worker.steps.feature import Feature, Hooks, Taken

LIMITS = WorkerLimits(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
MIB = 1 << 20


class Taking(Feature):
    """Takes so many bytes, and leaves so many slots."""

    def __init__(self, name: str, nbytes: int, slots: int) -> None:
        self._name, self._nbytes, self._slots = name, nbytes, slots
        self.seen: list[tuple[int, int]] = []
        """The bytes of the budget and the slots with which it was asked."""

    def step_bytes(self, limits: WorkerLimits) -> int:
        return limits.max_num_seqs * MIB

    def take(self, limits: WorkerLimits, budget: CacheBudget) -> Taken:
        self.seen.append((budget.nbytes, limits.max_num_seqs))
        return Taken(replace(limits, max_num_seqs=self._slots), self._nbytes, self._name)


class Small(Cpu):
    """A device that has 2 GiB, and counts what steps need."""

    def cache_budget(self, share: float | None, reserve: int) -> CacheBudget:
        return CacheBudget(2048 * MIB - reserve, "--of-this-test", 1 << 40)


def test_each_feature_takes_of_what_those_before_it_have_left(caplog: pytest.LogCaptureFixture) -> None:
    model = SimpleNamespace(attention_layers=list, causal=False)
    dtypes = {"dtype": torch.float32, "cache_dtype": torch.float32}
    loaded = SimpleNamespace(
        model=model, config=worker_config(), device=Small(1), groups=Groups(), tasks=("embed",), **dtypes
    )
    one, other = Taking("states", 30 * MIB, slots=4), Taking("copies", 20 * MIB, slots=4)
    with caplog.at_level(logging.INFO):
        memory = divide_memory(cast("Any", loaded), Hooks([one, other]), LIMITS, [torch.zeros(MIB // 4)])
    (before, slots), (after, fewer) = *one.seen, *other.seen
    assert (slots, fewer, memory.limits.max_num_seqs) == (8, 4, 4)
    gained = after - (before - 30 * MIB)
    assert 8 * MIB <= gained < 9 * MIB, "a step of fewer rows needs less: 1 MiB a row for either feature"
    assert memory.weight_bytes == MIB
    assert "memory: weights 1.0 MiB; states 30.0 MiB; copies 20.0 MiB; step buffers, up to" in caplog.text
