"""A batch: the record that its creation writes, the state that its runner writes, and what clients see."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from server.batches.folder import Folder, PageRequest, Record, not_found
from server.errors import BadRequest

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
MESSAGES = "/v1/messages"
"""The endpoint of batches that came in Anthropic's form: each line may have a model of its own."""
ENDED = ("completed", "failed", "expired", "cancelled")


class BatchRecord(Record, kw_only=True):
    endpoint: str = ""
    input_file_id: str = ""
    completion_window: str = ""
    expires_at: int = 0
    metadata: dict[str, str] | None = None
    output_seconds: int = 3600
    """Seconds for which its output is kept."""


class BatchError(msgspec.Struct):
    code: str
    line: int | None
    message: str
    param: str | None = None


class BatchState(msgspec.Struct, kw_only=True):
    status: Status = "validating"
    model: str | None = None
    total: int = 0
    left: int | None = None
    """The lines without an answer when it ended early."""
    ends_as: Status = "completed"
    """The status that it has once its results are files."""
    times: dict[str, int] = {}
    """The time at which it came into each status."""
    errors: list[BatchError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None

    def enter(self, status: Status) -> None:
        self.status = status
        self.times[status] = int(time.time())

    def fail(self, message: str) -> None:
        """End as a failed batch, once the lines that have no result are errors."""
        self.ends_as, self.errors = "failed", [BatchError("damaged_data", None, f"{message}.")]


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class Batch(msgspec.Struct, kw_only=True):
    """A batch as clients see it."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None
    errors: dict[str, object] | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


@dataclass(slots=True)
class StoredBatch:
    """A batch as the database has it."""

    record: BatchRecord
    state: BatchState
    completed: int
    failed: int
    """Lines that have an answer, and those that have an error."""
    cancelled_at: int | None

    def shown(self) -> Batch:
        """The batch as clients see it now."""
        record, state = self.record, self.state
        times, status = state.times, state.status
        if status not in ENDED and self.cancelled_at is not None:
            status = "cancelling"
        return Batch(
            id=record.id,
            endpoint=record.endpoint,
            model=state.model,
            errors={"object": "list", "data": state.errors} if state.errors else None,
            input_file_id=record.input_file_id,
            completion_window=record.completion_window,
            status=status,
            output_file_id=state.output_file_id,
            error_file_id=state.error_file_id,
            created_at=int(record.at),
            expires_at=record.expires_at,
            request_counts=RequestCounts(state.total, self.completed, self.failed),
            metadata=record.metadata,
            in_progress_at=times.get("in_progress"),
            finalizing_at=times.get("finalizing"),
            completed_at=times.get("completed"),
            failed_at=times.get("failed"),
            expired_at=times.get("expired"),
            cancelling_at=self.cancelled_at,
            cancelled_at=times.get("cancelled"),
        )


class BatchTable:
    """The batches in the database of a folder. All functions block."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._database = folder, folder.database

    def add(self, record: BatchRecord, total: int = 0) -> None:
        """Have a batch computed, of so many lines if they are counted.

        Raises NotFound if its input was deleted meanwhile.
        """
        self._folder.check_count("batches", record.owner)
        with self._database.write() as writer:
            added = writer.execute(
                "INSERT INTO batches (id, owner, at, input_file_id, record, state) SELECT ?, ?, ?, id, ?, ? "
                "FROM files WHERE id = ? AND owner = ? AND expires_at > ?",
                (
                    record.id,
                    record.owner,
                    record.at,
                    msgspec.json.encode(record),
                    msgspec.json.encode(BatchState(total=total)),
                    record.input_file_id,
                    record.owner,
                    time.time(),
                ),
            )
            if not added.rowcount:
                raise not_found("file", record.input_file_id)

    def find(self, id: str, owner: str) -> StoredBatch:
        """The batch of an id. Raises NotFound if there is none, or it is another one's."""
        found = self._read("id = ? AND owner = ?", id, owner)
        if not found:
            raise not_found("batch", id)
        return found[0]

    def page(self, owner: str, asked: PageRequest, prefix: str = "") -> tuple[list[StoredBatch], bool]:
        """A page of an owner's batches whose ids begin so, and whether there are more."""
        rows, more = self._folder.page("batches", owner, asked, "substr(id, 1, ?) = ?", len(prefix), prefix)
        return [_stored(row) for row in rows], more

    def to_do(self) -> list[StoredBatch]:
        """The batches that have not ended."""
        return self._read("ended_at IS NULL")

    def cancel(self, id: str, owner: str) -> StoredBatch:
        """Note that no more of a batch is to be computed."""
        if (status := self.find(id, owner).state.status) in ENDED:
            raise BadRequest(f"The batch {id} cannot be cancelled: it is {status}.", "batch_id")
        with self._database.write() as writer:
            asked = (int(time.time()), id)
            writer.execute("UPDATE batches SET cancelled_at = coalesce(cancelled_at, ?) WHERE id = ?", asked)
        return self.find(id, owner)

    def write(self, id: str, state: BatchState) -> None:
        """Write the state of a batch that has not ended."""
        with self._database.write() as writer:
            set_state(writer, id, state)

    def give_up(self, id: str, state: BatchState) -> None:
        """End a batch of which the database cannot be read as a whole."""
        with self._database.write() as writer:
            ended = (msgspec.json.encode(state), time.time(), id)
            writer.execute("UPDATE batches SET state = ?, ended_at = ? WHERE id = ?", ended)

    def _read(self, where: str, *values: object) -> list[StoredBatch]:
        return [_stored(row) for row in self._database.read(f"SELECT * FROM batches WHERE {where}", *values)]


def set_state(writer: Any, id: str, state: BatchState) -> bool:
    """Write the state of a batch in a transaction; if that ends it, forget its lines and their results.

    Returns whether this was possible: it is not, if the batch has ended.
    """
    ended_at = time.time() if state.status in ENDED else None
    changed = writer.execute(
        "UPDATE batches SET state = ?, ended_at = ? WHERE id = ? AND ended_at IS NULL",
        (msgspec.json.encode(state), ended_at, id),
    )
    if changed.rowcount and ended_at is not None:
        for table in ("lines", "results"):
            writer.execute(f"DELETE FROM {table} WHERE batch = ?", (id,))
    return bool(changed.rowcount)


def _stored(row: Any) -> StoredBatch:
    """The batch of a row. What is damaged of it is left open, and makes it a failed one."""
    record, state = _decode(row["record"], BatchRecord), _decode(row["state"], BatchState)
    if record is None or state is None:
        if state is None or state.status not in ENDED:
            state = BatchState(total=row["completed"] + row["failed"])
            state.fail("The record of this batch in the server's database (work.sqlite) is damaged")
            state.enter("failed" if row["ended_at"] is not None else "in_progress")
        columns = {name: row[name] for name in ("id", "owner", "at", "input_file_id")}
        record = record or BatchRecord(**columns)
    return StoredBatch(record, state, row["completed"], row["failed"], row["cancelled_at"])


T = TypeVar("T")


def _decode(data: Any, kind: type[T]) -> T | None:
    """The struct that a column holds; None if it is damaged."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError):
        return None
