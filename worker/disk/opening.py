"""Opens what a worker keeps of its cache on disk or in the host's memory, or says why there is nothing."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

import models
from models.fingerprint import digest_weights
from worker.config import WorkerConfig
from worker.disk.block_files import Bytes
from worker.disk.block_folder import BlockFolder
from worker.disk.block_store import BlockStore
from worker.disk.host_copies import HostCopies
from worker.disk.host_store import HostStore
from worker.disk.record_memory import BlockPieces, RecordMemory
from worker.disk.tiered_store import PinnedMemory, TieredStore
from worker.host.machine import available_memory
from worker.options import WorkerOptions
from worker.worker_facts import WorkerFacts

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = 1
"""Changes whenever blocks of the same tokens get other names, or their parts another order."""
_GIB = 1 << 30
_DEFAULT_GIB = 10.0
_DEFAULT_MEMORY_GIB = 4.0
"""The GiB of the host's memory through which blocks of a card go to files, if none are asked for: half of
what is available at most."""
_LEAST_SLOTS = 2  # one for what is saved, and one for what comes from files
_STATES_PART = 4
"""Where there are states, they get this part of the host's memory."""

Store = BlockStore | HostStore | TieredStore

_log = logging.getLogger(__name__)


class BlockMemory(Protocol):
    """The memory of blocks."""

    @property
    def parts(self) -> Sequence[Tensor]: ...
    @property
    def pieces(self) -> Sequence[Bytes]: ...
    def make_pages(self, blocks: int) -> None: ...


class RememberedStates(Protocol):
    """The memory of states."""

    def rows(self, first: int) -> Tensor: ...
    def remembered(self, first: int) -> Bytes: ...


class MakesCopies(Protocol):
    """The device of the cache."""

    def host_copies(self, parts: Sequence[Tensor], nbytes: int) -> HostCopies | None: ...


def uses_host_memory(options: WorkerOptions, device: str) -> bool:
    """Whether blocks of the cache are copied to the host's memory: a card's go to files through it, too."""
    return options.kv_offloading_size is not None or (options.kv_cache_dir is not None and device != "cpu")


def open_store(
    config: WorkerConfig,
    facts: WorkerFacts,
    device: MakesCopies,
    memory: BlockMemory,
    states: RememberedStates | None,
) -> Store | None:
    """Open the folder that the operator names, or the memory, or both; None if neither is asked for, or can
    be used.

    `states`: the memory of states, if layers have some.
    """
    options = config.options
    if options.kv_cache_dir is None and options.kv_offloading_size is None:
        return None
    kept = "--kv-cache-dir: nothing is kept on disk"
    if options.kv_cache_dir is None:
        kept = "--kv-offloading-size: nothing is kept in the host's memory"
    reason = _nothing_to_keep(facts) or (
        None if memory.parts else "no layer of the model has keys and values"
    )
    if reason is not None:
        _log.warning("%s, because %s", kept, reason)
        return None
    copies = list[HostCopies]()
    if uses_host_memory(options, facts.device):
        copies = _make_copies(config, facts, device, memory, states)
        if not copies:
            return None
    if (folder := options.kv_cache_dir) is not None:
        try:
            return _open_files(config, facts, Path(folder), memory, states, copies)
        except OSError as error:
            _log.warning("%s, because %s cannot be used: %s", kept, folder, error)
    if options.kv_offloading_size is not None:
        return HostStore(copies[0], HostStore(copies[1]) if copies[1:] else None)
    for each in copies:
        each.close()
    return None


def _make_copies(
    config: WorkerConfig,
    facts: WorkerFacts,
    device: MakesCopies,
    memory: BlockMemory,
    states: RememberedStates | None,
) -> list[HostCopies]:
    """Take this rank's share of the host's memory: for blocks, and for states if there are some; nothing, if
    that is too little. Raises ValueError if the machine has less than was asked for."""
    place, gib, available = config.place, config.options.kv_offloading_size, available_memory()
    if gib is None:
        gib = min(_DEFAULT_MEMORY_GIB, available / 2 / _GIB)
    nbytes, here = int(gib * _GIB) // place.size, place.local_ranks
    if nbytes * here > available:
        raise ValueError(
            f"--kv-offloading-size {gib:g} takes {nbytes * here / _GIB:.2f} GiB of this machine's memory, "
            f"and {available / _GIB:.2f} GiB are available: lower it"
        )
    of_states = nbytes // _STATES_PART if states is not None else 0
    made = [device.host_copies(memory.parts, nbytes - of_states)]
    if states is not None:
        made.append(device.host_copies([states.rows(facts.max_num_seqs + 1)], of_states))
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
    config: WorkerConfig,
    facts: WorkerFacts,
    folder: Path,
    memory: BlockMemory,
    states: RememberedStates | None,
    copies: Sequence[HostCopies],
) -> BlockStore | TieredStore:
    """Open the folder. `copies`: the host's memory before files; none if the cache is there itself.

    Raises OSError if the folder cannot be used.
    """
    options, place = config.options, config.place
    folder = folder.expanduser().absolute()
    gib = _DEFAULT_GIB if options.kv_cache_disk_gib is None else options.kv_cache_disk_gib

    def opened(kind: str, kept: RecordMemory, sizes: Sequence[int]) -> BlockStore:
        return BlockStore(BlockFolder(folder, _identity(config, facts, kind, sizes), int(gib * _GIB)), kept)

    def tiered(kind: str, kept: HostCopies, behind: TieredStore | None = None) -> TieredStore:
        return TieredStore(kept, opened(kind, PinnedMemory(kept), [kept.record_bytes]), behind)

    if copies:
        store = tiered("blocks", copies[0], tiered("states", copies[1]) if copies[1:] else None)
    else:
        pieces = memory.pieces
        store = opened("blocks", BlockPieces(pieces), [piece.shape[1] for piece in pieces])
        store.make_pages = memory.make_pages
        if states is not None:
            rows = states.remembered(facts.max_num_seqs + 1)
            store.states = opened("states", BlockPieces([rows]), [rows.shape[1]])
    if place.rank == 0:
        _log.info(
            "prefixes on disk: %s, %.2f of %g GiB in use, blocks of %d tokens of this model",
            *(folder, store.totals.held / _GIB, gib, len(store) // len(facts.windows) * facts.block_size),
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
