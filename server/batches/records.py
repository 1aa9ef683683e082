"""A batch: the record that its creation writes, the state that its runner writes, and what clients see."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import msgspec

from server.batches.folder import Folder, Record, read_record

Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
ENDED = ("completed", "failed", "expired", "cancelled")


class BatchRecord(Record, kw_only=True):
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: int
    metadata: dict[str, str] | None = None
    output_seconds: int
    """Seconds for which its output is kept."""
    output_file_id: str
    error_file_id: str


class BatchError(msgspec.Struct):
    code: str
    line: int | None
    message: str
    param: str | None = None


class BatchState(msgspec.Struct, kw_only=True):
    status: Status = "validating"
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    ends_as: Status = "completed"
    """The status that it has once its results are files."""
    times: dict[str, int] = {}
    """The time at which it came into each status."""
    errors: list[BatchError] = []

    def enter(self, status: Status) -> None:
        self.status = status
        self.times[status] = int(time.time())


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


class BatchFiles:
    """The places of all that a batch has in the folder."""

    def __init__(self, folder: Folder, id: str) -> None:
        at = folder.batches / id
        self.record, self.state = at.with_suffix(".json"), at.with_suffix(".state")
        self.input, self.cancel = at.with_suffix(".input"), at.with_suffix(".cancel")
        self.output, self.errors = at.with_suffix(".output"), at.with_suffix(".errors")

    def forget_input(self) -> None:
        """Delete what only a batch needs that has not ended."""
        self.input.unlink(missing_ok=True)
        self.cancel.unlink(missing_ok=True)

    def remove(self) -> None:
        for path in (self.record, self.state, self.input, self.cancel, self.output, self.errors):
            path.unlink(missing_ok=True)


def state_of(files: BatchFiles) -> BatchState:
    return read_record(files.state, BatchState) or BatchState()


def shown(folder: Folder, record: BatchRecord) -> Batch:
    """A batch as clients see it now."""
    files = BatchFiles(folder, record.id)
    state = state_of(files)
    times, status = state.times, state.status
    if status not in ENDED and (asked := _time_of(files.cancel)) is not None:
        status, times = "cancelling", {**times, "cancelling": asked}
    errors = {"object": "list", "data": state.errors} if state.errors else None
    has_files = status in ENDED
    return Batch(
        id=record.id,
        endpoint=record.endpoint,
        model=state.model,
        errors=errors,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=status,
        output_file_id=record.output_file_id if has_files and state.completed else None,
        error_file_id=record.error_file_id if has_files and state.failed else None,
        created_at=int(record.at),
        expires_at=record.expires_at,
        request_counts=RequestCounts(state.total, state.completed, state.failed),
        metadata=record.metadata,
        in_progress_at=times.get("in_progress"),
        finalizing_at=times.get("finalizing"),
        completed_at=times.get("completed"),
        failed_at=times.get("failed"),
        expired_at=times.get("expired"),
        cancelling_at=times.get("cancelling"),
        cancelled_at=times.get("cancelled"),
    )


def _time_of(path: Path) -> int | None:
    try:
        return int(path.stat().st_mtime)
    except FileNotFoundError:
        return None
