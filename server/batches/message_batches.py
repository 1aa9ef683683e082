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


class MessageBatch(msgspec.Struct, kw_only=True):
    """A batch as clients see it."""

    id: str
    type: str = "message_batch"
    processing_status: str
    request_counts: dict[str, int]
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
    try:
        BatchTable(folder).add(record, total=len(lines))
    finally:  # it is no file of the client, and stays for as long as the batch needs it
        folder.delete_file(file.id)
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
    has_ended = state.status in ENDED
    counts: dict[str, int] = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if has_ended:
        left = {"cancelled": "canceled", "expired": "expired"}.get(state.status, "errored")
        counts |= {"succeeded": batch.completed, left: state.left or 0}
        counts["errored"] = state.total - sum(counts[name] for name in ("succeeded", "canceled", "expired"))
    else:
        counts["processing"] = state.total
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
    with folder.database.write() as writer:
        writer.execute("DELETE FROM batches WHERE id = ?", (batch.record.id,))


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
                yield b"".join(_result(msgspec.json.decode(line)) for line in lines)


_ENDINGS = {"batch_cancelled": "canceled", "batch_expired": "expired"}


def _result(line: dict[str, Any]) -> bytes:
    """The result that a line of the output says."""
    result: dict[str, Any]
    match line:
        case {"response": {"status_code": 200, "body": body}}:
            result = {"type": "succeeded", "message": body}
        case {"response": {"body": body}}:
            result = {"type": "errored", "error": body}
        case {"error": {"code": code}} if code in _ENDINGS:
            result = {"type": _ENDINGS[code]}
        case _:
            result = {"type": "errored", "error": anthropic_error(500, line["error"]["message"])}
    return _encode({"custom_id": line["custom_id"], "result": result}) + b"\n"
