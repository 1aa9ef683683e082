"""The folder of work that waits: a database of files, batches and responses, and the contents of files.

Several API processes share it, and a process may be killed at any moment: what a file is counts only once the
database says so, and names are made here, never by clients. Everything in it may be read by the server's own
user only. All functions but `lock` and `in_use` block: call them in threads.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from server.batches.database import NAME, Damaged, Database
from server.errors import DISK_FULL, BadRequest, HttpError, NotFound
from worker.host.private_folder import make_folders

R = TypeVar("R", bound="Record")

MOST_RECORDS = 10_000
"""Files, and batches, that an owner may have."""
KEPT_SECONDS = 30 * 86_400
"""Seconds for which files are kept that say nothing else, and batches after their end."""
LEFT_OVER_SECONDS = 3600
"""Seconds after which a content that no file has, as a killed process leaves it, is deleted."""
LOOK_BYTES = 8 << 20
"""Bytes that are written of an upload between two looks at the budget."""

FULL_DISK = (
    "The disk of the server's folder for files, batches and responses is full. Delete what is not needed, or "
    "try again later; the operator can make room."
)

_log = logging.getLogger(__name__)


class Record(msgspec.Struct, kw_only=True):
    """A row of the database for a file or a batch."""

    id: str
    owner: str
    """The name of the key by which it came; others do not see it."""
    at: float = msgspec.field(default_factory=time.time)


class FileRecord(Record, kw_only=True):
    bytes: int
    checksum: int
    """The CRC-32 of its content."""
    filename: str
    purpose: str
    expires_at: int


class PageRequest(NamedTuple):
    """The part of a list that is asked for."""

    after: str | None
    """The id behind which it begins."""
    limit: int
    newest_first: bool


class Folder:
    """The folder, in which everything has a place by its id."""

    def __init__(self, path: Path, most_bytes: int, *, ends_with_server: bool = False) -> None:
        self.path, self.most_bytes = path, most_bytes
        self.files = path / "files"
        self._ends_with_server = ends_with_server
        self.database = Database(path / NAME, self._make)
        self.receiving = 0
        """The bytes of uploads to this process that are under way."""
        self.counted = 0
        """The bytes of everything when they were counted last, and of responses that were written since."""

    def _make(self) -> None:
        if self._ends_with_server and not self.in_use():
            _log.warning(
                "files, batches and conversations are kept in %s until the server ends: --batch-dir keeps "
                "them for longer",
                self.path,
            )
        make_folders(self.path)
        make_folders(self.files)

    def in_use(self) -> bool:
        """Whether anything was ever kept here."""
        return self.database.path.exists()

    def check(self) -> None:
        """Open the database. Raises OSError if the folder cannot be used, and says what to do."""
        self._make()
        if (descriptor := self.lock()) is not None:
            os.close(descriptor)
        for each in (self.path, self.files):
            if not os.access(each, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it is read-only, or belongs to somebody else", str(each))
        is_new = not self.in_use() or self.database.path.stat().st_size == 0
        older = ("files/*.json", "batches/*.json", "responses/*.json")
        if is_new and any(any(self.path.glob(each)) for each in older):
            raise OSError(
                errno.EINVAL,
                "it holds files, batches or responses of an older version. Let that version finish the "
                "batches and fetch their results (GET /v1/files/ID/content), then name an empty folder",
            )
        if is_new and any(self.files.glob("*.data")):
            raise Damaged(f"{self.database.path} is gone or empty: restore it, or name an empty folder")
        try:
            self.database.open()
            self.used()
        except Damaged as error:
            raise Damaged(
                f"{error.message}: restore it from a copy, or recover what can be read by "
                f"`sqlite3 {NAME} .recover | sqlite3 new.sqlite`, or name an empty folder"
            ) from error
        self.database.close()

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
        """The bytes of everything."""
        files = sum(row[0] for row in self.database.read("SELECT bytes FROM files"))
        self.counted = files + self.database.used_bytes() + self.receiving
        return self.counted

    def has_room(self) -> bool:
        """Counts the bytes of everything, and says whether there may be more."""
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

    def content(self, id: str) -> Path:
        """The place of a file's content."""
        return self.files / f"{id}.data"

    def open_content(self, id: str, size: int | None = None) -> int:
        """A descriptor for a file's content. Raises Damaged if it is gone, or has another size."""
        path = self.content(id)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may be a FIFO now
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            raise damaged_content(path, "cannot be read") from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or size not in (None, found.st_size):
            os.close(descriptor)
            raise damaged_content(path, "is not the file that was written")
        return descriptor

    def find_file(self, id: str, owner: str) -> FileRecord:
        """The record of a file. Raises NotFound."""
        rows = self.database.read(
            "SELECT * FROM files WHERE id = ? AND owner = ? AND expires_at > ?", id, owner, time.time()
        )
        if not rows:
            raise not_found("file", id)
        return read_row(rows[0], FileRecord)

    def list_files(
        self, owner: str, asked: PageRequest, purpose: str | None
    ) -> tuple[list[FileRecord], bool]:
        """A page of an owner's files, and whether there are more."""
        which = ("expires_at > ? AND coalesce(?, purpose) = purpose", time.time(), purpose or None)
        rows, more = self.page("files", owner, asked, *which)
        found: list[FileRecord] = []
        for row in rows:
            with suppress(msgspec.ValidationError):  # a damaged record is no file
                found.append(read_row(row, FileRecord))
        return found, more

    def page(
        self, table: str, owner: str, asked: PageRequest, where: str = "1", *values: object
    ) -> tuple[list[Any], bool]:
        """The rows of a page of an owner's files or batches, and whether there are more."""
        which, values = f"owner = ? AND {where}", (owner, *values)
        order, beyond = ("DESC", "<") if asked.newest_first else ("ASC", ">")
        if asked.after is not None:
            found = self.database.read(
                f"SELECT at FROM {table} WHERE {which} AND id = ?", *values, asked.after
            )
            if not found:
                raise not_found("record", asked.after)
            which, values = f"{which} AND (at, id) {beyond} (?, ?)", (*values, found[0]["at"], asked.after)
        ordered = f"{which} ORDER BY at {order}, id {order} LIMIT ?"
        rows = self.database.read(f"SELECT * FROM {table} WHERE {ordered}", *values, asked.limit + 1)
        return rows[: asked.limit], len(rows) > asked.limit

    def delete_file(self, id: str) -> None:
        """Forget a file. Its content stays until no batch needs it any more."""
        try:
            self._expire(id)
        except OSError as error:
            needed = "SELECT 1 FROM batches WHERE input_file_id = ? AND ended_at IS NULL"
            if error.errno not in DISK_FULL or self.database.read(needed, id):
                raise
            self.content(id).unlink(missing_ok=True)  # which makes room to note it
            self._expire(id)
        self.forget_expired()

    def _expire(self, id: str) -> None:
        with self.database.write() as writer:
            writer.execute("UPDATE files SET expires_at = 0 WHERE id = ?", (id,))

    def forget_expired(self) -> None:
        """Delete files whose time is over, but for those that batches need which have not ended."""
        gone = self.database.read(
            "SELECT id FROM files WHERE expires_at <= ? AND id NOT IN "
            "(SELECT input_file_id FROM batches WHERE ended_at IS NULL)",
            time.time(),
        )
        for row in gone:  # first, because noting it takes room on a disk that may be full
            self.content(row["id"]).unlink(missing_ok=True)
        if gone:
            with self.database.write() as writer:
                writer.executemany("DELETE FROM files WHERE id = ?", [(row["id"],) for row in gone])

    def clean(self) -> None:
        """Delete what has expired, and what killed processes have left over."""
        now = time.time()
        self.forget_expired()
        known = {row["id"] for row in self.database.read("SELECT id FROM files")}
        for path in self.files.iterdir():
            with suppress(FileNotFoundError, IsADirectoryError):
                if path.stem not in known and path.lstat().st_mtime < now - LEFT_OVER_SECONDS:
                    path.unlink()
        self.database.clean("batches", "ended_at <= ?", now - KEPT_SECONDS)
        self.database.vacuum()

    def check_count(self, table: str, owner: str) -> None:
        """Raises an error if an owner has as many files, or batches, as may be."""
        if len(self.database.read(f"SELECT 1 FROM {table} WHERE owner = ?", owner)) >= MOST_RECORDS:
            raise BadRequest(
                f"The server keeps at most {MOST_RECORDS} of these for a key: delete some first."
            )


def not_found(what: str, id: str) -> NotFound:
    return NotFound(f"There is no {what} {id[:64]!r} here.", f"{what}_id")


def damaged_content(path: Path, reason: str) -> Damaged:
    return Damaged(
        f"files/{path.name} in the server's folder {reason}: its disk or somebody else has changed it. "
        "Upload the file again"
    )


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def read_row(row: Any, kind: type[R]) -> R:
    """The record that a row of the database holds."""
    return msgspec.convert(dict(row), kind)


def add_file(writer: Any, record: FileRecord) -> None:
    """Note a file in a transaction. Its content has to be on the disk."""
    writer.execute(
        "INSERT INTO files VALUES (:id, :owner, :at, :bytes, :checksum, :filename, :purpose, :expires_at)",
        msgspec.structs.asdict(record),
    )


def sync_folder(path: Path) -> None:
    """Have names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class NewFile:
    """The content of a file while it is written. It is deleted by `close`, unless it is `kept`."""

    def __init__(self, folder: Folder) -> None:
        self.id, self.size, self.checksum, self.kept = new_id("file-"), 0, 0, False
        self._path = folder.content(self.id)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "wb")

    def write(self, data: bytes) -> None:
        self.size += len(data)
        self.checksum = zlib.crc32(data, self.checksum)
        self._file.write(data)

    def finish(self, owner: str, filename: str, purpose: str, seconds: int) -> FileRecord:
        """Have the content on the disk, and return the record that is to be added to the database."""
        self._file.flush()
        os.fsync(self._file.fileno())
        sync_folder(self._path.parent)
        return FileRecord(
            id=self.id,
            owner=owner,
            bytes=self.size,
            checksum=self.checksum,
            filename=filename,
            purpose=purpose,
            expires_at=int(time.time()) + seconds,
        )

    def close(self) -> None:
        if not self.kept:
            self._path.unlink(missing_ok=True)
        with suppress(OSError):  # a full disk refuses what is left in the buffer once more
            self._file.close()


class Upload:
    """A file while it is sent. What is not kept is deleted by `close`."""

    def __init__(self, folder: Folder, most: int, owner: str) -> None:
        folder.database.open()
        folder.check_count("files", owner)
        folder.check_room()
        self._folder, self._most, self._owner = folder, most, owner
        self._file, self._looked = NewFile(folder), 0

    def write(self, data: bytes) -> None:
        """Add to the file. Raises an error if it is too long, or the folder is full."""
        if self._file.size + len(data) > self._most:
            raise HttpError(413, f"A file may have at most {self._most} bytes: divide it.")
        self._folder.receiving += len(data)
        self._file.write(data)
        if self._file.size - self._looked > LOOK_BYTES:
            self._looked = self._file.size
            self._folder.check_room()

    def keep(self, filename: str, purpose: str, seconds: int) -> FileRecord:
        self._folder.check_room()
        record = self._file.finish(self._owner, filename, purpose, seconds)
        with self._folder.database.write() as writer:
            add_file(writer, record)
        self._file.kept = True
        return record

    def close(self) -> None:
        self._folder.receiving -= self._file.size
        self._file.close()
