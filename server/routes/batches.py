"""/v1/files and /v1/batches: files of requests, and their answers when there is time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import FileResponse

from server.access.request_state import state_of
from server.batches import bodies as api
from server.batches.database import Damaged
from server.batches.folder import (
    FULL_DISK,
    FileRecord,
    Folder,
    PageRequest,
    Upload,
    new_id,
)
from server.batches.records import BatchRecord, StoredBatch
from server.batches.runner import Runner
from server.errors import BadRequest, HttpError, TooManyRequests, refused_if_full
from server.http.endpoint import Endpoint, require_json
from server.http.multipart import FormReader
from server.http.sse import json_response

router = APIRouter(route_class=Endpoint, tags=["Files and batches"])

MOST_FILE = 512 << 20
"""Bytes of an uploaded file."""
MOST_UPLOADS = 8
"""Files that are sent to a process at a time."""
_MOST_FORM = MOST_FILE + (1 << 20)
"""The most bytes of a form with a file: what stands before and behind it counts, too."""
_LARGEST_PAGE = 10_000
_PREFIX = "batch_"


def runner_of(request: Request) -> Runner:
    return request.scope["app"].state.runner


def folder_of(request: Request) -> Folder:
    return runner_of(request).folder


def owner_of(request: Request) -> str:
    return state_of(request.scope).caller.key_name


# Files.


@router.post("/v1/files")
async def create_file(request: Request) -> Response:
    """Upload a file of requests, one per line. The form has `file`, `purpose` and maybe `expires_after`."""
    form = FormReader(state_of(request.scope).header(b"content-type") or "")
    length = state_of(request.scope).header(b"content-length") or "0"
    if length.isdecimal() and int(length) > _MOST_FORM:
        raise _too_long()
    with refused_if_full(FULL_DISK), _one_of_few(runner_of(request)):
        upload = await asyncio.to_thread(Upload, folder_of(request), MOST_FILE, owner_of(request))
        try:
            await form.receive(request.receive, upload.write, _MOST_FORM, _too_long())
            purpose = form.fields.get("purpose")
            if purpose != "batch":
                raise BadRequest(f"purpose: only 'batch' has a use here, got {purpose!r}.", "purpose")
            seconds = api.kept_seconds(api.form_expiry(form.fields), "expires_after")
            record = await asyncio.to_thread(upload.keep, form.filename or "file", purpose, seconds)
        finally:
            await asyncio.to_thread(upload.close)
    return json_response(_file(record))


def _too_long() -> HttpError:
    return HttpError(413, f"A file may have at most {MOST_FILE} bytes: divide it.")


@contextmanager
def _one_of_few(runner: Runner) -> Iterator[None]:
    """Counts uploads, and refuses one more than there may be."""
    if runner.uploads >= MOST_UPLOADS:
        raise TooManyRequests(f"{MOST_UPLOADS} files are sent at this moment: try again.", retry_after=1)
    runner.uploads += 1
    try:
        yield
    finally:
        runner.uploads -= 1


@router.get("/v1/files")
async def list_files(request: Request) -> Response:
    """List the files of this API key, page by page. Parameters: `limit`, `order`, `after`, `purpose`."""
    purpose, asked = request.query_params.get("purpose"), read_page(request, _LARGEST_PAGE, _LARGEST_PAGE)
    found, more = await asyncio.to_thread(folder_of(request).list_files, owner_of(request), asked, purpose)
    return listed([_file(each) for each in found], more)


@router.get("/v1/files/{file_id}")
async def retrieve_file(file_id: str, request: Request) -> Response:
    """Show a file."""
    return json_response(_file(await _find_file(request, file_id)))


@router.get("/v1/files/{file_id}/content")
async def file_content(file_id: str, request: Request) -> Response:
    """Download a file. A file of results has a line for each request."""
    record = await _find_file(request, file_id)
    path = await asyncio.to_thread(_whole_content, folder_of(request), record)
    return FileResponse(path, media_type="application/octet-stream")


def _whole_content(folder: Folder, record: FileRecord) -> Path:
    """The place of a file's content. Raises an error if that is not whole."""
    try:
        os.close(folder.open_content(record.id, record.bytes))
    except Damaged as damage:
        raise HttpError(500, f"{damage.message}.") from None
    return folder.content(record.id)


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request) -> Response:
    """Delete a file. A batch that was made of it goes on."""
    record = await _find_file(request, file_id)
    with refused_if_full(FULL_DISK):
        await asyncio.to_thread(folder_of(request).delete_file, record.id)
    return json_response(api.Deleted(record.id))


async def _find_file(request: Request, id: str) -> FileRecord:
    return await asyncio.to_thread(folder_of(request).find_file, id, owner_of(request))


def _file(record: FileRecord) -> api.FileObject:
    return api.FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.at),
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=record.purpose,
    )


# Batches.


@router.post("/v1/batches", dependencies=[Depends(require_json)])
async def create_batch(body: api.BatchRequest, request: Request) -> Response:
    """Start a batch of the requests in a file. It runs when the server has nothing more urgent to do."""
    seconds = api.window_seconds(body.completion_window)
    source = await _find_file(request, body.input_file_id)
    if source.purpose != "batch":
        raise BadRequest(f"input_file_id: the file has the purpose {source.purpose}.", "input_file_id")
    record = BatchRecord(
        id=new_id(_PREFIX),
        owner=owner_of(request),
        endpoint=body.endpoint,
        input_file_id=source.id,
        completion_window=body.completion_window,
        expires_at=int(time.time()) + seconds,
        metadata=body.metadata,
        output_seconds=api.kept_seconds(body.output_expires_after, "output_expires_after"),
    )
    runner = runner_of(request)
    with refused_if_full(FULL_DISK):
        await asyncio.to_thread(runner.batches.add, record)
    runner.wake()
    return json_response((await _find_batch(request, record.id)).shown())


@router.get("/v1/batches")
async def list_batches(request: Request) -> Response:
    """List the batches of this API key, the newest first. Parameters: `limit`, `after`."""
    batches, asked = runner_of(request).batches, read_page(request, 20, 100)
    found, more = await asyncio.to_thread(batches.page, owner_of(request), asked, _PREFIX)
    return listed([each.shown() for each in found], more)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(batch_id: str, request: Request) -> Response:
    """Show a batch and its progress."""
    return json_response((await _find_batch(request, batch_id)).shown())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """Cancel a batch. What was computed becomes its output."""
    runner = runner_of(request)
    with refused_if_full(FULL_DISK):
        found = await asyncio.to_thread(runner.batches.cancel, batch_id, owner_of(request))
    runner.wake()
    return json_response(found.shown())


async def _find_batch(request: Request, id: str) -> StoredBatch:
    return await asyncio.to_thread(runner_of(request).batches.find, id, owner_of(request))


def listed(data: Sequence[Any], more: bool) -> Response:
    """A page of a list, whose entries have ids."""
    return json_response(api.page_of([(each.id, each) for each in data], more))


def read_page(request: Request, usual: int, most: int) -> PageRequest:
    """The part of a list that the query asks for."""
    asked = request.query_params
    limit, order = asked.get("limit") or str(usual), asked.get("order") or "desc"
    if not (limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise BadRequest(f"limit: {limit[:20]!r} is not a number from 1 to {most}.", "limit")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order: {order[:20]!r} is neither asc nor desc.", "order")
    return PageRequest(asked.get("after") or None, int(limit), order == "desc")
