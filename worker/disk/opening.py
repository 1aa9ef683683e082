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
from worker.host.machine import available_memory
from worker.worker_facts import WorkerFacts

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = 1
"""Changes whenever blocks of the same tokens get other names, or their parts another order."""
_GIB = 1 << 30
_DEFAULT_GIB = 10.0
_STATES_PART = 4
"""Where there are states, they get this part of the host's memory."""

_NO_KEYS = "no layer of the model has keys and values"

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


class EncodesMedia(Protocol):
    """The encodings of media items; None: this worker makes none."""

    @property
    def encodings(self) -> RecordMemory | None: ...


class MakesCopies(Protocol):
    """The device of the cache."""

    def host_copies(self, parts: Sequence[Tensor], nbytes: int) -> HostCopies | None: ...


def open_store(
    config: WorkerConfig,
    facts: WorkerFacts,
    device: MakesCopies,
    memory: BlockMemory,
    states: RememberedStates | None,
    media: EncodesMedia | None,
) -> BlockStore | HostStore | None:
    """Open the folder that the operator names, or the memory; None if neither is asked for, or can be used.

    `states`: the memory of states, if layers have some; `media`: what encodes media items, if there is such.
    """
    if config.options.kv_offloading_size is not None:
        return _open_host(config, facts, device, memory, states)
    return _open_disk(config, facts, memory, states, media)


def _open_host(
    config: WorkerConfig,
    facts: WorkerFacts,
    device: MakesCopies,
    memory: BlockMemory,
    states: RememberedStates | None,
) -> HostStore | None:
    """Take this rank's share of the host's memory. Raises ValueError if there is less."""
    place, gib = config.place, config.options.kv_offloading_size or 0.0
    reason = _nothing_to_keep(facts) or (None if memory.parts else _NO_KEYS)
    if reason is not None:
        _log.warning("--kv-offloading-size: nothing is kept in the host's memory, because %s", reason)
        return None
    nbytes, here = int(gib * _GIB) // place.size, place.local_ranks
    if nbytes * here > (available := available_memory()):
        raise ValueError(
            f"--kv-offloading-size {gib:g} takes {nbytes * here / _GIB:.2f} GiB of this machine's memory, "
            f"and {available / _GIB:.2f} GiB are available: lower it"
        )
    of_states = nbytes // _STATES_PART if states is not None else 0
    blocks, kept = device.host_copies(memory.parts, nbytes - of_states), None
    if states is not None:
        kept = device.host_copies([states.rows(facts.max_num_seqs + 1)], of_states)
    if blocks is None or (states is not None and kept is None):
        _log.warning("--kv-offloading-size: nothing is kept, because %g GiB are less than one block", gib)
        return None
    if place.rank == 0:
        tokens = blocks.slots // len(facts.windows) * facts.block_size
        _log.info("prefixes in the host's memory: %d tokens at most, for all workers %g GiB", tokens, gib)
    return HostStore(blocks, None if kept is None else HostStore(kept))


def _open_disk(
    config: WorkerConfig,
    facts: WorkerFacts,
    memory: BlockMemory,
    states: RememberedStates | None,
    media: EncodesMedia | None,
) -> BlockStore | None:
    """Open the folder that the operator names; None if none is named, or if it cannot be used."""
    options, place = config.options, config.place
    if options.kv_cache_dir is None:
        return None
    pieces: Sequence[Bytes] = ()
    reason = _nothing_to_keep(facts)
    if facts.device != "cpu":
        reason = f"that needs a CPU for now, and this is {facts.device}: give --kv-offloading-size"
    if reason is None and not (pieces := memory.pieces):
        reason = _NO_KEYS
    if reason is not None:
        _log.warning("--kv-cache-dir: nothing is kept on disk, because %s", reason)
        return None
    folder = Path(options.kv_cache_dir).expanduser().absolute()
    gib = _DEFAULT_GIB if options.kv_cache_disk_gib is None else options.kv_cache_disk_gib

    def open_one(kind: str, kept: RecordMemory, sizes: Sequence[int]) -> BlockStore:
        return BlockStore(BlockFolder(folder, _identity(config, facts, kind, sizes), int(gib * _GIB)), kept)

    def open_blocks(kind: str, kept: Sequence[Bytes]) -> BlockStore:
        return open_one(kind, BlockPieces(kept), [piece.shape[1] for piece in kept])

    try:
        store = open_blocks("blocks", pieces)
        store.make_pages = memory.make_pages
        if states is not None:
            store.states = open_blocks("states", [states.remembered(facts.max_num_seqs + 1)])
        if media is not None and media.encodings is not None and facts.kept_embeddings:
            store.encodings = open_one("encodings", media.encodings, [media.encodings.record_bytes])
    except OSError as error:
        _log.warning("--kv-cache-dir: nothing is kept on disk, because %s cannot be used: %s", folder, error)
        return None
    if place.rank == 0:
        _log.info(
            "prefixes on disk: %s, %.2f of %g GiB in use, blocks of %d tokens of this model",
            *(folder, store.totals.held / _GIB, gib, len(store) // len(facts.windows) * facts.block_size),
        )
        if (kept := store.encodings) is not None:
            used = len(kept) * kept.block_bytes / _GIB
            _log.info("prefixes on disk: %.2f GiB are encodings of pictures for this model", used)
    return store


def _nothing_to_keep(facts: WorkerFacts) -> str | None:
    """The reason why blocks of this model cannot be kept, or None."""
    if not facts.causal:
        return "the model reads each text as a whole, and has no KV cache"
    if facts.remembered_states == 0:
        return "layers of the model keep states, and no memory is left to remember some (--state-snapshots)"
    return None


def _identity(config: WorkerConfig, facts: WorkerFacts, kind: str, sizes: Sequence[int]) -> str:
    """A name of all that decides the bytes of a block, a state or an encoding, beside its tokens or picture:
    engines with one share files.

    The fingerprint covers weights, types, kernels and the order of sums; what is left is our own Python.
    """
    parts: tuple[object, ...] = _FORMAT, kind, facts.fingerprint, facts.block_size, facts.windows, [*sizes]
    place, drafter = config.place, config.drafter
    if drafter is not None:  # its entries lie in blocks, too
        weights = digest_weights(Path(drafter.folder), config.options.load_format, config.options.seed)
        parts += drafter.method, weights, msgspec.json.encode(drafter.model, order="sorted")
    if place.size > 1:
        parts += place.tensor_rank, place.tensor_size, place.context_size, place.stage, place.stages
    digest = hashlib.sha256(repr(parts).encode())
    root = Path(models.__file__ or "").parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:24]
