"""Batches in a folder, and a scripted server that answers their lines."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from server.batches.app_call import Answer, OwnerCalls
from server.batches.folder import Folder, Upload
from server.batches.records import ENDED, Batch, BatchRecord, BatchTable
from server.batches.runner import Runner

PATH = "/v1/completions"


class ScriptedCalls:
    """Answers each line after a moment; every seventh one is refused."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.asked: list[tuple[str, bytes]] = []
        self.under_way = self.most = 0

    async def answer(self, owner: str, path: str, body: bytes, request_id: str) -> Answer:
        self.asked.append((owner, body))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.under_way -= 1
        number = json.loads(body)["prompt"]
        return Answer(400 if number % 7 == 6 else 200, b'{"text":"%d"}' % number)


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(
        msgspec.json.encode({"custom_id": f"r{n}", "url": PATH, "body": {"prompt": n}}) + b"\n"
        for n in range(first, first + count)
    )


def new_batch(folder: Folder, content: bytes, owner: str = "", seconds: float = 100.0) -> BatchRecord:
    upload = Upload(folder, 1 << 20, owner)
    upload.write(content)
    file = upload.keep("in.jsonl", "batch", 3600)
    upload.close()
    record = BatchRecord(
        id=f"batch_{file.id.removeprefix('file-')}",
        owner=owner,
        endpoint=PATH,
        input_file_id=file.id,
        completion_window="24h",
        expires_at=int(time.time() + seconds),
    )
    BatchTable(folder).add(record)
    return record


def shown(folder: Folder, id: str) -> Batch:
    """The batch as its client sees it, whoever that is."""
    [[owner]] = folder.database.read("SELECT owner FROM batches WHERE id = ?", id)
    return BatchTable(folder).find(id, owner).shown()


async def until(folder: Folder, id: str, is_so: Callable[[Batch], bool]) -> Batch:
    for _ in range(2000):
        if is_so(found := shown(folder, id)):
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"it stays {shown(folder, id)}")


def ended(batch: Batch) -> bool:
    return batch.status in ENDED


def results(folder: Folder, batch: Batch) -> dict[str, Any]:
    """The line of each request; fails if one has two."""
    found: dict[str, Any] = {}
    for id in (batch.output_file_id, batch.error_file_id):
        for line in folder.content(id).read_bytes().splitlines() if id else ():
            value = json.loads(line)
            assert value["custom_id"] not in found
            found[value["custom_id"]] = value
    return found


async def with_runner(folder: Folder, calls: ScriptedCalls, work: Awaitable[Any], most: int = 8) -> Any:
    task = asyncio.create_task(Runner(folder, cast(OwnerCalls, calls), lambda: most).run())
    try:
        return await work
    finally:
        task.cancel()
        await asyncio.wait([task])
