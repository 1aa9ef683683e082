"""Opens the blocks on disk of a worker, or says why its model keeps none there."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import models
from worker.config import Place, WorkerConfig
from worker.disk.block_files import Bytes
from worker.disk.block_folder import BlockFolder
from worker.disk.block_store import BlockStore
from worker.disk.record_memory import BlockPieces, RecordMemory
from worker.worker_facts import WorkerFacts

_FORMAT = 1
"""Changes whenever blocks of the same tokens get other names, or their parts another order."""
_GIB = 1 << 30
_DEFAULT_GIB = 10.0

_log = logging.getLogger(__name__)


class BlockMemory(Protocol):
    """The memory of blocks."""

    @property
    def pieces(self) -> Sequence[Bytes]: ...
    def make_pages(self, blocks: int) -> None: ...


class RememberedStates(Protocol):
    """The memory of states."""

    def remembered(self, first: int) -> Bytes: ...


class EncodesMedia(Protocol):
    """The encodings of media items; None: this worker makes none."""

    @property
    def encodings(self) -> RecordMemory | None: ...


def open_store(
    config: WorkerConfig,
    facts: WorkerFacts,
    memory: BlockMemory,
    states: RememberedStates | None,
    media: EncodesMedia | None,
) -> BlockStore | None:
    """Open the folder that the operator names; None if none is named, or if it cannot be used.

    `states`: the memory of states, if layers have some; `media`: what encodes media items, if there is such.
    """
    options, place = config.options, config.place
    if options.kv_cache_dir is None:
        return None
    pieces: Sequence[Bytes] = ()
    reason = _nothing_to_keep(facts)
    if reason is None and not (pieces := memory.pieces):
        reason = "no layer of the model has keys and values"
    if reason is not None:
        _log.warning("--kv-cache-dir: nothing is kept on disk, because %s", reason)
        return None
    folder = Path(options.kv_cache_dir).expanduser().absolute()
    gib = _DEFAULT_GIB if options.kv_cache_disk_gib is None else options.kv_cache_disk_gib

    def open_one(kind: str, kept: RecordMemory, sizes: Sequence[int]) -> BlockStore:
        return BlockStore(BlockFolder(folder, _identity(facts, kind, sizes, place), int(gib * _GIB)), kept)

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
    if facts.device != "cpu":
        return f"that needs a CPU for now, and this is {facts.device}"
    if not facts.causal:
        return "the model reads each text as a whole, and has no KV cache"
    if facts.remembered_states == 0:
        return "layers of the model keep states, and no memory is left to remember some (--state-snapshots)"
    if facts.drafts:
        return "a drafter is loaded, whose entries are kept in memory only for now"
    return None


def _identity(facts: WorkerFacts, kind: str, sizes: Sequence[int], place: Place) -> str:
    """A name of all that decides the bytes of a block, a state or an encoding, beside its tokens or picture:
    engines with one share files.

    The fingerprint covers weights, types, kernels and the order of sums; what is left is our own Python.
    """
    parts: tuple[object, ...] = _FORMAT, kind, facts.fingerprint, facts.block_size, facts.windows, [*sizes]
    if place.size > 1:
        parts += place.tensor_rank, place.tensor_size, place.context_size, place.stage, place.stages
    digest = hashlib.sha256(repr(parts).encode())
    root = Path(models.__file__ or "").parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:24]
