"""Packed weights in the cache folder: the next start maps them in place of packing the matrices again.

Packing copies all matrices into fresh memory, which is most of a start. A file holds the matrices of one load
in the order in which layers pack them, and lies in a folder whose name is a digest of all that decides its
bytes. Mapped pages are those of the system's cache of files, which all servers of the model share.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

import models
from models.fingerprint import digest_weights
from models.loader import EarlierLoad, LoadOptions
from models.plugins import registrations
from worker.cache_tiers.block_files import open_regular, read_front, with_front
from worker.cache_tiers.block_folder import BlockFolder
from worker.capacity import GIB
from worker.host.machine import cache_folder
from worker.host.private_folder import file_states
from worker.kernels.cpu import packing

logger = logging.getLogger(__name__)

LEAST_BYTES = 16 << 20
"""Fewer packed bytes are not kept: packing them takes less than a tenth of a second."""
_MAGIC = b"facet packed 1\n\0"
_ALIGNMENT = 64
_SAMPLES, _SAMPLE_BYTES = 4, 64
"""Pieces of a matrix whose digest is compared when its file is found, evenly spread, and their size."""
_MADV_POPULATE_READ = 22
"""The advice to map pages that are to be read, since Linux 5.14. Older systems map each when it is read."""
_POPULATED_AT_ONCE = 32 << 20
_LEAST_PRIORITY = 19


class Misfit(Exception):
    """A file of packed weights holds other matrices than the model packs."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A matrix of a file."""

    form: bytes
    """The description by which kernels read it, without addresses."""
    start: int
    """Its place behind the head."""
    nbytes: int
    sample: bytes
    """A digest of a few of its bytes."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a file."""

    identity: str
    entries: list[Entry]


class PackedMatrices:
    """The matrices of a load: those of a file in their order, or those that are packed, to be kept."""

    def __init__(self, found: tuple[Head, Tensor] | None = None) -> None:
        """`found`: the head of a file, and the bytes behind it; None: there is none."""
        self.is_found = found is not None
        self.packed: list[tuple[bytes, Tensor]] = []
        self._entries, self._memory = (found[0].entries, found[1]) if found else ([], torch.empty(0))
        self._given = 0

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes if self.is_found else sum(memory.nbytes for _, memory in self.packed)

    def find(self, form: bytes, nbytes: int) -> Tensor | None:
        """The next matrix, which is described so; None if it has to be packed. Raises Misfit."""
        if not self.is_found:
            return None
        if self._given >= len(self._entries):
            raise Misfit("the model packs more matrices")
        entry = self._entries[self._given]
        if (entry.form, entry.nbytes) != (form, nbytes):
            raise Misfit(f"matrix {self._given} has another form")
        self._given += 1
        return self._memory[entry.start : entry.start + nbytes]

    def add(self, form: bytes, memory: Tensor) -> None:
        self.packed.append((form, memory))

    def check_whole(self) -> None:
        """Raise Misfit if a matrix of the file was not asked for."""
        if self._given < len(self._entries):
            raise Misfit("the model packs fewer matrices")


class PackedCache:
    """Finds the packed weights of models in the cache folder, and keeps those that it does not find."""

    def __init__(self, gib: float, of_device: tuple[object, ...], parent: Path | None = None) -> None:
        """`gib`: the most of all files together; `of_device`: all of the device that decides how it packs."""
        self.mapped_bytes = 0
        self._budget, self._of_device, self._parent = int(gib * GIB), of_device, parent
        self._unsaved: list[tuple[BlockFolder, PackedMatrices]] = []
        self._misfits = False
        self._spares_reading = True

    @contextmanager
    def loading(self, options: LoadOptions) -> Iterator[EarlierLoad]:
        """Have a load within the context use what is kept of it -> what it need not do.

        Raises Misfit if that is not what the model packs, or if it needs numbers that were not read: load it
        again.
        """
        folder = None if self._misfits else self._open_folder(options)
        if folder is None:
            yield EarlierLoad()
            return
        packed = find_packed(folder)
        before = packing.kept.set(packed)
        try:
            yield EarlierLoad(packed.is_found, packed.is_found and self._spares_reading)
            packed.check_whole()
        except Exception as reason:
            if packed.is_found and self._spares_reading:
                logger.debug("all is read, as it is wanted", exc_info=True)
                self._spares_reading = False
                raise Misfit("numbers are wanted that were not read") from reason
            if isinstance(reason, Misfit):
                logger.warning("packed weights in %s are not used: %s", folder.root, reason)
                self._misfits = True
                with suppress(OSError):
                    folder.remove_own()
            raise
        finally:
            packing.kept.reset(before)
        if packed.is_found:
            self.mapped_bytes += packed.nbytes
        elif packed.nbytes >= LEAST_BYTES:
            self._unsaved.append((folder, packed))

    def save(self) -> threading.Thread | None:
        """Write what is not kept yet, in a thread, for the next start."""
        unsaved, self._unsaved = self._unsaved, []
        if not unsaved:
            return None
        writer = threading.Thread(target=_write_all, args=(unsaved,), name="packed-cache", daemon=True)
        writer.start()
        return writer

    def _open_folder(self, options: LoadOptions) -> BlockFolder | None:
        """The folder of a model's packed weights; None if they are few, if nothing can tell when they change,
        or if it cannot be used."""
        if options.load_format == "dummy" or options.trust_remote_code or registrations().classes:
            return None
        folder = options.folder
        files = file_states(folder.rglob("*") if folder.is_dir() else [folder])
        if sum(size for _, size, _ in files) < LEAST_BYTES:
            return None
        try:
            identity = identity_of(options, (files, *self._of_device))
            return BlockFolder(self._parent or cache_folder(), identity, self._budget, "packed")
        except OSError as error:
            logger.info("packed weights are not kept: %s", error)
            return None


def identity_of(options: LoadOptions, others: tuple[object, ...]) -> str:
    """Name all that decides the bytes of packed weights: the model, its share, the code, and `others`."""
    parallel, replicas = options.parallel, options.parallel.replicas
    parts = (
        digest_weights(options.folder, options.load_format, options.seed),
        file_states(Path(models.__path__[0]).rglob("*.py")),
        file_states(Path(packing.__file__).parent.glob("*.py")),
        msgspec.json.encode(options.config, order="sorted"),
        options.conversion,
        options.pooling,
        (str(options.dtype), options.load_format, options.model_impl, options.method, options.max_len),
        (options.language_model_only, options.target is None),
        (
            parallel.rank,
            parallel.size,
            parallel.stage,
            parallel.stages,
            parallel.most_ranks,
            parallel.guesses,
        ),
        (parallel.experts, replicas and (replicas.rank, replicas.size)),
        others,
        torch.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def find_packed(folder: BlockFolder) -> PackedMatrices:
    """Map the file of a folder, if there is a whole one."""
    with suppress(OSError):
        for path in sorted(folder.names().values(), reverse=True):
            if (found := _mapped(path, folder.identity)) is not None:
                with suppress(OSError):
                    os.utime(path)  # those that were used last are kept the longest
                return PackedMatrices(found)
            logger.info("%s is not whole: the weights are packed again", path)
    return PackedMatrices()


def _mapped(path: Path, identity: str) -> tuple[Head, Tensor] | None:
    """The head of a file, and the bytes behind it; None if it is damaged. Raises OSError."""
    file = open_regular(path)
    try:
        front = read_front(file, _MAGIC)
        if front is None:
            return None
        body, start = front
        head = msgspec.msgpack.decode(body, type=Head)
        size = os.fstat(file).st_size
        ends = [entry.start + entry.nbytes for entry in head.entries]
        if head.identity != identity or size != start + max(ends, default=0) or size == start:
            return None
        # Private: what somebody writes by mistake changes no file. Pages that nobody writes to are shared.
        pages = mmap.mmap(file, size, access=mmap.ACCESS_COPY)
        # What is not in memory is read in large pages, where the system can.
        with suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)[start:]
    finally:
        os.close(file)
    pieces = (memory[entry.start : entry.start + entry.nbytes] for entry in head.entries)
    if any(_sample(piece) != entry.sample for piece, entry in zip(pieces, head.entries, strict=True)):
        return None
    threading.Thread(target=_populate, args=(memory,), name="map-weights", daemon=True).start()
    return head, memory


def _populate(memory: Tensor) -> None:
    """Map all pages while the model is built, in pieces, for nobody else maps anything during one."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    stop = memory.data_ptr() + memory.nbytes
    for start in range(first, stop, _POPULATED_AT_ONCE):
        madvise(start, min(_POPULATED_AT_ONCE, stop - start), _MADV_POPULATE_READ)


def _write_all(unsaved: list[tuple[BlockFolder, PackedMatrices]]) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
    for folder, packed in unsaved:
        try:
            if write_packed(folder, packed):
                text = "%.2f GiB of packed weights are kept in %s, where the next start maps them"
                logger.info(text, packed.nbytes / GIB, folder.root)
        except OSError as error:
            logger.info(
                "packed weights are not kept in %s, so the next start packs again: %s", folder.root, error
            )


def write_packed(folder: BlockFolder, packed: PackedMatrices) -> bool:
    """Write the matrices of a load into a file -> whether that was left to do. Raises OSError."""
    folder.tidy()
    if folder.is_being_filled():
        return False
    if shutil.disk_usage(folder.root).free < 2 * packed.nbytes:
        raise OSError(f"fewer than {2 * packed.nbytes / GIB:.2f} GiB are free")
    entries: list[Entry] = []
    pieces: list[bytes | memoryview] = []
    start = 0
    for form, memory in packed.packed:
        gap = -start % _ALIGNMENT
        start += gap
        entries.append(Entry(form, start, memory.nbytes, _sample(memory)))
        pieces += [bytes(gap), memory.numpy().data]
        start += memory.nbytes
    head = with_front(_MAGIC, msgspec.msgpack.encode(Head(folder.identity, entries)))
    written = folder.write([head, *pieces], lasting=True)
    for path in folder.names().values():
        if path != written:  # a damaged one, or that of a server which began at the same time
            path.unlink(missing_ok=True)
    return True


def _sample(memory: Tensor) -> bytes:
    last = max(0, memory.nbytes - _SAMPLE_BYTES)
    places = [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    samples = (memory[place : place + _SAMPLE_BYTES].numpy().tobytes() for place in places)
    return hashlib.blake2b(b"".join(samples), digest_size=16).digest()
