"""The folder of work that waits: files, batches and responses, each with its owner, within a budget of bytes.

Several API processes share it, and a process may be killed at any moment. A record is replaced as a whole, a
file is there once its record is, and names are made here, never by clients. Everything in it may be read by
the server's own user only. All functions but `lock` block: call them in threads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from server.errors import BadRequest, HttpError, NotFound
from worker.host.private_folder import make_folders

R = TypeVar("R", bound="Record")

MOST_RECORDS = 10_000
"""Files, and batches, that there may be."""
KEPT_SECONDS = 30 * 86_400
"""Seconds for which files are kept that say nothing else, and batches after their end."""
LEFT_OVER_SECONDS = 3600
"""Seconds after which a file without a record, as a killed process leaves it, is deleted."""
LOOK_BYTES = 8 << 20
"""Bytes that are written of an upload between two looks at the budget."""

FULL_DISK = (
    "The disk of the server's folder for files, batches and responses is full. Delete what is not needed, or "
    "try again later; the operator can make room."
)

_ID = re.compile(r"[a-z]+[-_][0-9a-f]{24,40}")


class Record(msgspec.Struct, kw_only=True):
    """What is known of a file, a batch or a response."""

    id: str
    owner: str
    """The name of the key by which it came; others do not see it."""
    at: float = msgspec.field(default_factory=time.time)


class FileRecord(Record, kw_only=True):
    bytes: int
    filename: str
    purpose: str
    expires_at: int


class Folder:
    """The folder, in which everything has a place by its id."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path, self.most_bytes = path, most_bytes
        self.files, self.batches, self.responses = path / "files", path / "batches", path / "responses"
        for each in (path, self.files, self.batches, self.responses):
            make_folders(each)
        self.counted = 0
        """The bytes of all files when they were counted last, and of responses that were written since."""

    def check_access(self) -> None:
        """Raises PermissionError if the server may not write here, or the folder lies on a read-only disk."""
        for each in (self.path, self.files, self.batches, self.responses):
            if not os.access(each, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it is read-only, or belongs to somebody else", str(each))

    def lock(self) -> int | None:
        """The descriptor that makes this process the one which does the work, or None: another one does."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    # Bytes.

    def used(self) -> int:
        """The bytes of all files; one that has two names counts once."""
        sizes: dict[int, int] = {}
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(FileNotFoundError):
                    found = os.stat(os.path.join(folder, name))
                    sizes[found.st_ino] = found.st_size
        self.counted = sum(sizes.values())
        return self.counted

    def has_room(self) -> bool:
        """Counts the bytes of all files, and says whether there may be more."""
        return self.used() <= self.most_bytes

    def check_room(self) -> None:
        """Raises an error if the folder is full by a new count."""
        if not self.has_room():
            raise self.full()

    def full(self) -> HttpError:
        """The error of a folder whose budget is used up."""
        return HttpError(
            507,
            f"The server's folder for files and batches is full: it holds {self.most_bytes >> 20} MiB. "
            "Delete files that are not needed; the operator can raise --batch-gib.",
        )

    # Files.

    def file(self, id: str) -> Path:
        """The place of a file's content."""
        return self.files / f"{id}.data"

    def find_file(self, id: str, owner: str) -> FileRecord:
        found = self.find(self.files, id, owner, FileRecord, "file")
        if found.expires_at <= time.time():
            raise not_found("file", id)
        return found

    def delete_file(self, id: str) -> None:
        for path in (self.files / f"{id}.json", self.file(id)):
            path.unlink(missing_ok=True)

    def clean(self) -> None:
        """Delete files that have expired, and what killed processes have left over."""
        now = time.time()
        for record in self.records(self.files, FileRecord):
            if record.expires_at <= now:
                self.delete_file(record.id)
        for path in (*self.files.iterdir(), *self.batches.iterdir(), *self.responses.iterdir()):
            has_record = path.suffix == ".json" or path.with_suffix(".json").exists()
            with suppress(FileNotFoundError):
                if not has_record and path.stat().st_mtime < now - LEFT_OVER_SECONDS:
                    path.unlink()

    # Records.

    def find(self, folder: Path, id: str, owner: str, kind: type[R], what: str) -> R:
        """The record of an id. Raises NotFound if there is none, or it is another one's."""
        found = read_record(folder / f"{id}.json", kind) if _ID.fullmatch(id) else None
        if found is None or found.owner != owner:
            raise not_found(what, id)
        return found

    def records(self, folder: Path, kind: type[R], name: str = "*") -> Iterator[R]:
        for path in folder.glob(f"{name}.json"):
            if (found := read_record(path, kind)) is not None:
                yield found

    def check_count(self, folder: Path) -> None:
        """Raises an error if there are as many records as may be."""
        if sum(1 for _ in folder.glob("*.json")) >= MOST_RECORDS:
            raise BadRequest(f"The server keeps at most {MOST_RECORDS} of these: delete some first.")


def not_found(what: str, id: str) -> NotFound:
    return NotFound(f"There is no {what} {id[:64]!r} here.", f"{what}_id")


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


S = TypeVar("S", bound=msgspec.Struct)


def read_record(path: Path, kind: type[S]) -> S | None:
    """The struct that a file holds, or None if there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def write_record(path: Path, record: msgspec.Struct, *, durable: bool = True) -> int:
    """Put a record in the place of another one, and return its bytes. If it is `durable`, it is on the disk
    afterwards."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    data = msgspec.json.encode(record)
    try:
        write_all(part, data, durable=durable)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)
    return len(data)


def write_all(path: Path, data: bytes, *, durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def touch(path: Path) -> None:
    """Make an empty file, which is on the disk afterwards."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    sync_folder(path.parent)


class Upload:
    """A file while it is sent. What is not kept is deleted by `close`."""

    def __init__(self, folder: Folder, most: int) -> None:
        folder.check_count(folder.files)
        folder.check_room()
        self.size = 0
        self._folder, self._most = folder, most
        self._id = new_id("file-")
        self._part = folder.files / f"{self._id}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._part, flags, 0o600), "wb")
        self._looked = 0

    def write(self, data: bytes) -> None:
        """Add to the file. Raises an error if it is too long, or the folder is full."""
        self.size += len(data)
        if self.size > self._most:
            raise HttpError(413, f"A file may have at most {self._most} bytes: divide it.")
        if self.size - self._looked > LOOK_BYTES:
            self._looked = self.size
            self._folder.check_room()
        self._file.write(data)

    def keep(self, owner: str, filename: str, purpose: str, seconds: int) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._folder.check_room()
        record = FileRecord(
            id=self._id,
            owner=owner,
            bytes=self.size,
            filename=filename,
            purpose=purpose,
            expires_at=int(time.time()) + seconds,
        )
        content = self._folder.file(self._id)
        os.replace(self._part, content)
        try:
            write_record(self._folder.files / f"{self._id}.json", record)
        except OSError:
            content.unlink(missing_ok=True)
            raise
        return record

    def close(self) -> None:
        self._part.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk refuses what is left in the buffer once more
            self._file.close()


def page_of(found: list[R], after: str | None, limit: int, *, newest_first: bool) -> tuple[list[R], bool]:
    """The records that a list shows behind the one of the id `after`, and whether there are more."""
    found = sorted(found, key=lambda record: (record.at, record.id), reverse=newest_first)
    if after is not None:
        places = [place for place, record in enumerate(found) if record.id == after]
        if not places:
            raise not_found("record", after)
        found = found[places[0] + 1 :]
    return found[:limit], len(found) > limit
