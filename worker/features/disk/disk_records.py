"""Disk as a feature: blocks and states that are kept in files or in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable

from worker.capacity import CacheBudget, WorkerLimits
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.disk.host_copies import MOST_STAGED
from worker.disk.opening import (
    BlockMemory,
    RememberedStates,
    Store,
    open_store,
    uses_host_memory,
)
from worker.steps.feature import Feature, Taken
from worker.worker_facts import WorkerFacts


class DiskRecords(Feature):
    _store: Store | None = None

    def __init__(
        self,
        config: WorkerConfig,
        device: Device,
        states: Callable[[], RememberedStates | None],
    ) -> None:
        """`states` tells the memory of states once there is some."""
        self._config, self._device, self._states = config, device, states

    def take(self, limits: WorkerLimits, budget: CacheBudget) -> Taken:
        """Take what records pass through on their way to the host's memory, and back."""
        uses = uses_host_memory(self._config.options, self._device.target.type)
        return Taken(limits, 4 * MOST_STAGED if uses else 0, "copies to the host")

    def open_store(self, facts: WorkerFacts, blocks: BlockMemory) -> Store | None:
        given = self._config, facts, self._device, blocks, self._states()
        self._store = open_store(*given)
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
