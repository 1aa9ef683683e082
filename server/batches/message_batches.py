"""Batches of messages, as Anthropic's API has them: requests become lines, and lines results."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from server.batches.batch_run import MOST_LINE_BYTES, MOST_LINES
from server.batches.bodies import MOST_KEPT
from server.batches.folder import Folder, Upload, new_id
from server.batches.records import ENDED, MESSAGES, BatchRecord, BatchTable, StoredBatch
from server.errors import BadRequest, anthropic_error

PREFIX = "msgbatch_"
"""The beginning of the ids of these batches, which lie among the others."""
_SECONDS = 86_400
_AT_A_TIME = 1 << 16
"""Bytes of results that are sent in one piece, about."""

_encode = msgspec.json.encode


class _Asked(msgspec.Struct):
    custom_id: str
    params: dict[str, msgspec.Raw]


class _Body(msgspec.Struct):
    requests: list[_Asked]


class Counts(msgspec.Struct, kw_only=True):
    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    """A batch as clients see it."""

    id: str
    type: str = "message_batch"
    processing_status: str
    request_counts: Counts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class DeletedBatch(msgspec.Struct):
    id: str
    type: str = "message_batch_deleted"


def create(folder: Folder, owner: str, raw: bytes | bytearray) -> str:
    """Have the requests of a body answered, and return the id of the batch. It blocks."""
    lines = _read_lines(raw)
    with closing(Upload(folder, sum(map(len, lines)), owner)) as upload:
        for line in lines:
            upload.write(line)
        file = upload.keep("requests.jsonl", "batch", _SECONDS)
    record = BatchRecord(
        id=new_id(PREFIX),
        owner=owner,
        endpoint=MESSAGES,
        input_file_id=file.id,
        completion_window="24h",
        expires_at=int(time.time()) + _SECONDS,
        output_seconds=MOST_KEPT,
    )
    BatchTable(folder).add(record, total=len(lines))
    folder.delete_file(file.id)  # it is no file of the client, and stays for as long as the batch needs it
    return record.id


def _read_lines(raw: bytes | bytearray) -> list[bytes]:
    """The lines that a batch has for the requests of a body. Raises BadRequest."""
    try:
        requests = msgspec.json.decode(raw, type=_Body).requests
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(
            "The body should be an object with `requests`: a list of objects, each with a `custom_id`, a "
            "string, and `params`, the body of a request to /v1/messages.",
            "requests",
        ) from None
    if not 1 <= len(requests) <= MOST_LINES:
        raise BadRequest(f"requests: a batch has 1 to {MOST_LINES}, got {len(requests)}.", "requests")
    lines, seen = list[bytes](), set[str]()
    for index, each in enumerate(requests):
        name, line = f"requests[{index}]", {"custom_id": each.custom_id, "url": MESSAGES, "body": each.params}
        if each.custom_id in seen:
            raise BadRequest(f"{name}: the custom_id {each.custom_id[:64]!r} is there twice.", "requests")
        if bytes(each.params.get("stream", b"")) == b"true":
            raise BadRequest(f"{name}.params.stream: an answer in a batch cannot be streamed.", "requests")
        lines.append(_encode(line).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")
        if len(lines[-1]) > MOST_LINE_BYTES:
            raise BadRequest(f"{name} has more than {MOST_LINE_BYTES} bytes.", "requests")
        seen.add(each.custom_id)
    return lines


def shown(batch: StoredBatch) -> MessageBatch:
    """A batch as clients see it now."""
    record, state, cancelled = batch.record, batch.state, batch.cancelled_at
    counts, has_ended = Counts(processing=state.total), state.status in ENDED
    if has_ended:
        left = state.left or 0
        counts = Counts(succeeded=batch.completed)
        if state.status == "cancelled":
            counts.canceled = left
        elif state.status == "expired":
            counts.expired = left
        counts.errored = state.total - batch.completed - counts.canceled - counts.expired
    return MessageBatch(
        id=record.id,
        processing_status="ended" if has_ended else "in_progress" if cancelled is None else "canceling",
        request_counts=counts,
        created_at=_time(record.at),
        expires_at=_time(record.expires_at),
        ended_at=_time(state.times.get(state.status, record.at)) if has_ended else None,
        cancel_initiated_at=None if cancelled is None else _time(cancelled),
        results_url=f"{MESSAGES}/batches/{record.id}/results" if has_ended else None,
    )


def _time(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).isoformat().replace("+00:00", "Z")


def delete(folder: Folder, batch: StoredBatch) -> None:
    """Forget a batch that has ended, and its files. It blocks."""
    if batch.state.status not in ENDED:
        raise BadRequest(f"The batch {batch.record.id} has not ended: cancel it first, or wait for its end.")
    for id in (batch.state.output_file_id, batch.state.error_file_id):
        if id is not None:
            folder.delete_file(id)
    BatchTable(folder).delete(batch.record.id)


def results(folder: Folder, batch: StoredBatch) -> Iterator[bytes]:
    """The results of a batch that has ended, a line each. It blocks.

    Raises an error before the first piece, if there are none that can be read.
    """
    if batch.state.status not in ENDED:
        raise BadRequest(f"The batch {batch.record.id} has not ended: it has no results yet.")
    ids = [id for id in (batch.state.output_file_id, batch.state.error_file_id) if id is not None]
    files = [folder.find_file(id, batch.record.owner) for id in ids]
    for file in files:
        os.close(folder.open_content(file.id, file.bytes))
    return _read([folder.content(file.id) for file in files])


def _read(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while lines := file.readlines(_AT_A_TIME):
                yield b"".join(_result(msgspec.json.decode(line, type=_Line)) for line in lines)


class _Answered(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Failed(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct):
    """A line of a batch's output."""

    custom_id: str
    response: _Answered | None
    error: _Failed | None


_ENDINGS = {"batch_cancelled": "canceled", "batch_expired": "expired"}


def _result(line: _Line) -> bytes:
    result: dict[str, Any]
    if (answer := line.response) is not None:
        has_message = answer.status_code == 200
        name, kind = ("message", "succeeded") if has_message else ("error", "errored")
        result = {"type": kind, name: answer.body}
    elif line.error is not None and (ending := _ENDINGS.get(line.error.code)):
        result = {"type": ending}
    else:
        message = "" if line.error is None else line.error.message
        result = {"type": "errored", "error": anthropic_error(500, message)}
    return _encode({"custom_id": line.custom_id, "result": result}) + b"\n"
