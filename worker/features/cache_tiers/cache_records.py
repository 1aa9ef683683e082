"""Disk as a feature: what a worker keeps of its cache in files or in the host's memory, or why nothing."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

import models
from models.fingerprint import digest_weights
from worker.cache_tiers.block_files import Bytes
from worker.cache_tiers.block_folder import BlockFolder
from worker.cache_tiers.block_store import BlockStore
from worker.cache_tiers.host_copies import MOST_STAGED, HostCopies
from worker.cache_tiers.host_store import HostStore
from worker.cache_tiers.record_memory import BlockMemory, BlockPieces, RecordMemory
from worker.cache_tiers.tiered_store import PinnedMemory, Store, TieredStore
from worker.capacity import GIB, CacheBudget, WorkerLimits
from worker.config import WorkerConfig
from worker.devices.base import Device
from worker.host.machine import available_memory
from worker.steps.feature import Feature, Taken
from worker.worker_facts import WorkerFacts

_FORMAT = 1
"""Changes whenever blocks of the same tokens get other names, or their parts another order."""
_DEFAULT_GIB = 10.0
_DEFAULT_MEMORY_GIB = 4.0
"""The GiB of the host's memory through which blocks of a card go to files, if none are asked for: half of
what is available at most."""
_LEAST_SLOTS = 2  # one for what is saved, and one for what comes from files
_STATES_PART = 4
"""Where there are states, they get this part of the host's memory."""

_log = logging.getLogger(__name__)


class RememberedStates(Protocol):
    """The memory of states."""

    def rows(self, first: int) -> Tensor: ...
    def remembered(self, first: int) -> Bytes: ...


class CacheRecords(Feature):
    _store: Store | None = None

    def __init__(
        self, config: WorkerConfig, device: Device, states: Callable[[], RememberedStates | None]
    ) -> None:
        """`states` tells the memory of states once there is some."""
        self._config, self._device, self._states = config, device, states
        options = config.options
        self._in_memory, self._folder = options.kv_offloading_size is not None, options.kv_cache_dir
        self._copies = self._in_memory or device.target.type != "cpu"
        """Whether blocks are copied to the host's memory: a card's go to files through it, too."""

    def take(self, limits: WorkerLimits, budget: CacheBudget) -> Taken:
        """Take what records pass through on their way to the host's memory, and back."""
        return Taken(limits, 4 * MOST_STAGED if self._copies else 0, "copies to the host")

    def open_store(self, facts: WorkerFacts, blocks: BlockMemory) -> Store | None:
        """Open the folder that the operator names, or the memory, or both; None if neither can be used."""
        kept = "--kv-offloading-size: nothing is kept in the host's memory"
        if self._folder is not None:
            kept = "--kv-cache-dir: nothing is kept on disk"
        without = None if blocks.parts else "no layer of the model has keys and values"
        if (reason := _nothing_to_keep(facts) or without) is not None:
            _log.warning("%s, because %s", kept, reason)
            return None
        copies = self._make_copies(facts, blocks) if self._copies else []
        if self._copies and not copies:
            return None
        self._store = self._open(facts, blocks, copies, kept)
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _open(
        self, facts: WorkerFacts, blocks: BlockMemory, copies: Sequence[HostCopies], kept: str
    ) -> Store | None:
        if self._folder is not None:
            try:
                return self._open_files(facts, Path(self._folder), blocks, copies)
            except OSError as error:
                _log.warning("%s, because %s cannot be used: %s", kept, self._folder, error)
        if self._in_memory:
            return HostStore(copies[0], HostStore(copies[1]) if copies[1:] else None)
        for each in copies:
            each.close()
        return None

    def _make_copies(self, facts: WorkerFacts, blocks: BlockMemory) -> list[HostCopies]:
        """Take this rank's share of the host's memory: for blocks, and for states if there are some; nothing,
        if that is too little. Raises ValueError if the machine has less than was asked for."""
        config, states, available = self._config, self._states(), available_memory()
        place, gib = config.place, config.options.kv_offloading_size
        if gib is None:
            gib = min(_DEFAULT_MEMORY_GIB, available / 2 / GIB)
        nbytes, here = int(gib * GIB) // place.size, place.local_ranks
        if nbytes * here > available:
            raise ValueError(
                f"--kv-offloading-size {gib:g} takes {nbytes * here / GIB:.2f} GiB of this machine's memory, "
                f"and {available / GIB:.2f} GiB are available: lower it"
            )
        of_states = nbytes // _STATES_PART if states is not None else 0
        made = [self._device.host_copies(blocks.parts, nbytes - of_states)]
        if states is not None:
            made.append(self._device.host_copies([states.rows(facts.max_num_seqs + 1)], of_states))
        copies = [each for each in made if each is not None and each.slots >= _LEAST_SLOTS]
        if len(copies) < len(made):
            _log.warning(
                "--kv-offloading-size: nothing is kept there, because %g GiB are less than two blocks", gib
            )
            return []
        if place.rank == 0:
            tokens = copies[0].slots // len(facts.windows) * facts.block_size
            _log.info("prefixes in the host's memory: %d tokens at most, for all workers %g GiB", tokens, gib)
        return copies

    def _open_files(
        self, facts: WorkerFacts, folder: Path, blocks: BlockMemory, copies: Sequence[HostCopies]
    ) -> BlockStore | TieredStore:
        """Open the folder. `copies`: the host's memory before files; none if the cache is there itself.

        Raises OSError if the folder cannot be used.
        """
        config, states = self._config, self._states()
        folder, gib = folder.expanduser().absolute(), config.options.kv_cache_disk_gib
        gib = _DEFAULT_GIB if gib is None else gib

        def opened(kind: str, kept: RecordMemory, sizes: Sequence[int]) -> BlockStore:
            return BlockStore(
                BlockFolder(folder, _identity(config, facts, kind, sizes), int(gib * GIB)), kept
            )

        def tiered(kind: str, kept: HostCopies, behind: TieredStore | None = None) -> TieredStore:
            return TieredStore(kept, opened(kind, PinnedMemory(kept), [kept.record_bytes]), behind)

        if copies:
            store = tiered("blocks", copies[0], tiered("states", copies[1]) if copies[1:] else None)
        else:
            pieces = blocks.pieces
            store = opened("blocks", BlockPieces(pieces), [piece.shape[1] for piece in pieces])
            store.make_pages = blocks.make_pages
            if states is not None:
                rows = states.remembered(facts.max_num_seqs + 1)
                store.states = opened("states", BlockPieces([rows]), [rows.shape[1]])
        if config.place.rank == 0:
            _log.info(
                "prefixes on disk: %s, %.2f of %g GiB in use, blocks of %d tokens of this model",
                *(folder, store.totals.held / GIB, gib, len(store) // len(facts.windows) * facts.block_size),
            )
        return store


def _nothing_to_keep(facts: WorkerFacts) -> str | None:
    """The reason why blocks of this model cannot be kept, or None."""
    if not facts.causal:
        return "the model reads each text as a whole, and has no KV cache"
    if facts.remembered_states == 0:
        return "layers of the model keep states, and no memory is left to remember some (--state-snapshots)"
    return None


def _identity(config: WorkerConfig, facts: WorkerFacts, kind: str, sizes: Sequence[int]) -> str:
    """Name all that decides the bytes of a block or a state, beside its tokens: engines with one share files.

    The fingerprint covers weights, types, kernels and the order of sums; what is left is our own Python.
    """
    parts: tuple[object, ...] = _FORMAT, kind, facts.fingerprint, facts.block_size, facts.windows, [*sizes]
    place, drafter = config.place, config.drafter
    if drafter is not None:  # its entries lie in blocks, too
        weights = digest_weights(Path(drafter.folder), config.options.load_format, config.options.seed)
        parts += drafter.method, weights, msgspec.json.encode(drafter.model, order="sorted")
    if place.size > 1:
        parts += place.tensor_rank, place.tensor_size, place.stage, place.stages
    digest = hashlib.sha256(repr(parts).encode())
    root = Path(models.__file__ or "").parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:24]
