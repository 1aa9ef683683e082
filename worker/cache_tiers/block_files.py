"""The format of a file of cache blocks: a head with names and digests, then the bytes of each block.

Nothing changes a file once it has its name. A disk may lose or change any part of one, so the head is checked
when a file is found, and each block when it is read. This module knows no folders.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import msgspec
import numpy as np

PAGE, LARGE_PAGE = 4096, 2 << 20
_MOST_VIEWS = 1024
"""The most that one call of the system writes."""
_MAGIC = b"facet blocks 1\n\0"
_FRONT = Struct("<16sQ16s")  # _MAGIC, the bytes of the head, their digest
_WORDS = PAGE // 8
_WEIGHTS = np.frombuffer(hashlib.shake_256(b"facet").digest(PAGE), np.uint64) | np.uint64(1)
"""Odd factors of the words of a page: a change of any one word changes the sum."""

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a file."""

    identity: str
    """A digest of all that decides the bytes of a block, beside its tokens."""
    record_bytes: int
    names: list[bytes]
    digests: list[bytes]

    def encode(self) -> bytes:
        """The head as it stands in a file, in whole pages."""
        return with_front(_MAGIC, msgspec.msgpack.encode(self))


@dataclass(frozen=True, slots=True, eq=False)
class BlockFile:
    """A file whose head was read and found to be right."""

    path: Path
    start: int
    """The place of the first block."""
    head: Head

    @property
    def nbytes(self) -> int:
        return self.start + len(self.head.names) * self.head.record_bytes


def with_front(magic: bytes, body: bytes) -> bytes:
    """A head as it stands in a file, in whole pages. `magic` [16 bytes] names the kind of the file."""
    front = _FRONT.pack(magic, len(body), _digest(body))
    return (front + body).ljust(padded(len(front + body)), b"\0")


def read_front(file: int, magic: bytes) -> tuple[bytes, int] | None:
    """Read the body of an open file's head -> it, and the place behind the head. Raises OSError.

    None if it is not whole, or of another kind, or others can write the file.
    """
    found = os.fstat(file)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return None
    front = os.pread(file, _FRONT.size, 0).ljust(_FRONT.size, b"\0")
    own, length, digest = _FRONT.unpack(front)
    if own != magic or length > found.st_size:
        return None
    body = os.pread(file, length, _FRONT.size)
    return (body, padded(_FRONT.size + length)) if _digest(body) == digest else None


def padded(nbytes: int) -> int:
    """So many bytes, rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def digest_of(name: bytes, record: Bytes) -> bytes:
    """The digest [16 bytes] of a block's name and of its bytes, which fill whole pages.

    Each page becomes one weighted sum, and these are hashed: that takes as long as reading memory does.
    """
    sums = record.view(np.uint64).reshape(-1, _WORDS) @ _WEIGHTS
    return _digest(name + sums.tobytes())


def open_regular(path: Path) -> int:
    """Open a regular file to read it; anything else is not touched: opening a FIFO waits for a writer, and
    opening a device may do anything. Raises OSError."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def read_head(path: Path, identity: str, record_bytes: int) -> BlockFile | None:
    """Read the head of a file; None if it is not whole, or of another kind. Raises OSError."""
    file = open_regular(path)
    try:
        front, size = read_front(file, _MAGIC), os.fstat(file).st_size
    finally:
        os.close(file)
    if front is None:
        return None
    body, start = front
    head = msgspec.msgpack.decode(body, type=Head)
    if (head.identity, head.record_bytes) != (identity, record_bytes):
        return None
    if size != start + len(head.names) * record_bytes or len(head.digests) != len(head.names):
        return None
    return BlockFile(path, start, head)


def read_record(file: int, found: BlockFile, index: int, into: Bytes) -> bool:
    """Read a block of an open file into these bytes -> whether they are what was written. Raises OSError."""
    at, view = found.start + index * found.head.record_bytes, into.data
    while view:
        count = os.preadv(file, [view], at)
        if not count:
            return False
        at, view = at + count, view[count:]
    return digest_of(found.head.names[index], into) == found.head.digests[index]


def write_all(file: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write pieces one behind the other into an open file, a large page at a time. Raises OSError.

    Linux keeps what one write brings in one page, if the file system can, and maps it as such.
    """
    at, left = 0, deque(memoryview(piece).cast("B") for piece in pieces if len(piece))
    while left:
        room, views = LARGE_PAGE - at % LARGE_PAGE, list[memoryview]()
        for view in itertools.islice(left, _MOST_VIEWS):
            views.append(view[:room])
            room -= len(views[-1])
            if not room:
                break
        count = os.pwritev(file, views, at)
        at += count
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
