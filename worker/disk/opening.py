"""Opens the blocks on disk of a worker, or says why its model keeps none there."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import models
from worker.disk.block_files import Bytes
from worker.disk.block_folder import BlockFolder
from worker.disk.block_store import BlockStore
from worker.options import WorkerOptions
from worker.protocol import WorkerFacts

_FORMAT = 1
"""Changes whenever blocks of the same tokens get other names, or their parts another order."""
_GIB = 1 << 30
_DEFAULT_GIB = 10.0

_log = logging.getLogger(__name__)


def open_store(
    options: WorkerOptions, facts: WorkerFacts, memory: Callable[[], Sequence[Bytes]]
) -> BlockStore | None:
    """Open the folder that the operator names; None if none is named, or if it cannot be used.

    `memory`: for each part of the cache, the bytes of all blocks [blocks, bytes].
    """
    if options.kv_cache_dir is None:
        return None
    if reason := _nothing_to_keep(facts):
        _log.warning("--kv-cache-dir: nothing is kept on disk, because %s", reason)
        return None
    folder = Path(options.kv_cache_dir).expanduser().absolute()
    gib = _DEFAULT_GIB if options.kv_cache_disk_gib is None else options.kv_cache_disk_gib
    pieces = memory()
    try:
        store = BlockStore(BlockFolder(folder, _identity(facts, pieces), int(gib * _GIB)), pieces)
    except OSError as error:
        _log.warning("--kv-cache-dir: nothing is kept on disk, because %s cannot be used: %s", folder, error)
        return None
    _log.info(
        "prefixes on disk: %s, %.2f of %g GiB in use, blocks of %d tokens of this model",
        *(folder, store.totals.held / _GIB, gib, len(store) // len(facts.windows) * facts.block_size),
    )
    return store


def _nothing_to_keep(facts: WorkerFacts) -> str | None:
    """The reason why blocks of this model cannot be kept, or None."""
    if facts.device != "cpu":
        return f"that needs a CPU for now, and this is {facts.device}"
    if not facts.causal:
        return "the model reads each text as a whole, and has no KV cache"
    if facts.remembered_states is not None:
        return "layers of the model keep states, which are kept in memory only for now"
    if facts.drafts:
        return "a drafter is loaded, whose entries are kept in memory only for now"
    return None


def _identity(facts: WorkerFacts, pieces: Sequence[Bytes]) -> str:
    """A name of all that decides a block's bytes beside its tokens: two engines with one share files.

    The fingerprint covers weights, types, kernels and the order of sums; what is left is our own Python.
    """
    parts = _FORMAT, facts.fingerprint, facts.block_size, facts.windows, [piece.shape[1] for piece in pieces]
    digest = hashlib.sha256(repr(parts).encode())
    root = Path(models.__file__ or "").parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:24]
