"""Batches over a scripted server, under random cancels, ends of their time, kills and refusals."""

import asyncio
import json
import random
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.batches import batch_run, journal, runner
from server.batches.app_call import Answer, OwnerCalls
from server.batches.folder import FileRecord, Folder, Upload, write_record
from server.batches.records import ENDED, Batch, BatchFiles, BatchRecord, shown, state_of
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
    upload = Upload(folder, 1 << 20)
    upload.write(content)
    file = upload.keep(owner, "in.jsonl", "batch", 3600)
    upload.close()
    record = BatchRecord(
        id=f"batch_{file.id.removeprefix('file-')}",
        owner=owner,
        endpoint=PATH,
        input_file_id=file.id,
        completion_window="24h",
        expires_at=int(time.time() + seconds),
        output_seconds=3600,
        output_file_id="file-" + random.randbytes(16).hex(),
        error_file_id="file-" + random.randbytes(16).hex(),
    )
    files = BatchFiles(folder, record.id)
    files.input.write_bytes(content)
    write_record(files.record, record)
    return record


async def until(folder: Folder, record: BatchRecord, is_so: Callable[[Batch], bool]) -> Batch:
    for _ in range(2000):
        if is_so(found := shown(folder, record)):
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"it stays {shown(folder, record)}")


def ended(batch: Batch) -> bool:
    return batch.status in ENDED


def results(folder: Folder, batch: Batch) -> dict[str, Any]:
    """The line of each request; fails if one has two."""
    found: dict[str, Any] = {}
    for id in (batch.output_file_id, batch.error_file_id):
        for line in folder.file(id).read_bytes().splitlines() if id else ():
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


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(runner, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(batch_run, "_TOLD_SECONDS", 0.0)
    monkeypatch.setattr(batch_run, "_FULL_SECONDS", 0.01)


async def test_answers_and_refusals_are_files_of_their_own(tmp_path: Path) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls(0.001)
    record = new_batch(folder, lines(200), owner="alice")
    batch = await with_runner(folder, calls, until(folder, record, ended))
    assert batch.status == "completed" and batch.request_counts.total == 200
    assert (batch.request_counts.completed, batch.request_counts.failed) == (172, 28)
    found = results(folder, batch)
    assert found.keys() == {f"r{n}" for n in range(200)}
    assert found["r5"]["response"]["body"] == {"text": "5"} and found["r5"]["error"] is None
    assert found["r6"]["response"]["status_code"] == 400
    assert {owner for owner, _ in calls.asked} == {"alice"} and calls.most == 8
    assert folder.find_file(batch.output_file_id or "", "alice").purpose == "batch_output"
    assert {path.suffix for path in folder.batches.iterdir()} == {".json", ".state"}
    assert all(path.stat().st_mode & 0o77 == 0 for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (lines(2) + b"{\n", "invalid_json_line", 3),
        (
            lines(1) + b'{"custom_id": "x", "url": "/v1/completions", "body": {"a": NaN}}\n',
            "invalid_json_line",
            2,
        ),
        (
            lines(1) + b'{"custom_id": "x", "url": "/v1/completions", "body": [1]}\n',
            "missing_required_parameter",
            2,
        ),
        (lines(1) + b'{"url": "/v1/completions", "body": {}}', "missing_required_parameter", 2),
        (lines(2) + lines(1), "duplicate_custom_id", 3),
        (b'{"custom_id": "x", "url": "/v1/embeddings", "body": {}}\n', "invalid_url", 1),
        (b'{"custom_id": "x", "url": "/v1/completions", "method": "GET", "body": {}}\n', "invalid_method", 1),
        (b'{"custom_id": "x", "url": "/v1/completions", "body": {"stream": true}}\n', "invalid_request", 1),
        (
            lines(1) + b'{"custom_id": "x", "url": "/v1/completions", "body": {"model": "b"}}\n',
            "mismatched_model",
            2,
        ),
        (b'{"custom_id": "' + b"x" * 300 + b"\n", "line_too_long", 1),
    ],
)
async def test_a_wrong_line_fails_the_batch_before_anything_is_computed(
    tmp_path: Path, content: bytes, code: str, line: int | None
) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls()
    record = new_batch(folder, content)
    with patch.object(batch_run, "MOST_LINE_BYTES", 256):
        batch = await with_runner(folder, calls, until(folder, record, ended))
    assert batch.status == "failed" and batch.errors is not None and not calls.asked
    (error,) = cast("list[batch_run.BatchError]", batch.errors["data"])
    assert (error.code, error.line) == (code, line) and error.message


async def test_batches_of_owners_take_turns(tmp_path: Path) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls(0.001)
    long = new_batch(folder, lines(2000), owner="alice")
    short = new_batch(folder, lines(10), owner="bob")
    await with_runner(folder, calls, until(folder, short, ended))
    assert not ended(shown(folder, long))


async def test_a_full_folder_makes_a_batch_wait(tmp_path: Path) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls()
    record = new_batch(folder, lines(3))
    folder.most_bytes = 10

    async def wait() -> Batch:
        await until(folder, record, lambda batch: batch.status == "in_progress")
        await asyncio.sleep(0.05)
        assert not calls.asked
        folder.most_bytes = 1 << 30
        return await until(folder, record, ended)

    assert len(results(folder, await with_runner(folder, calls, wait()))) == 3


async def test_a_disk_that_fails_for_a_while_loses_nothing(tmp_path: Path) -> None:
    folder, calls, left = Folder(tmp_path, 1 << 30), ScriptedCalls(), [3]
    real = journal.os.pwrite

    def failing(file: int, data: memoryview, at: int) -> int:
        if left[0] and len(data) > 20:
            left[0] -= 1
            real(file, data[:20], at)
            raise OSError(28, "No space left on device")
        return real(file, data, at)

    record = new_batch(folder, lines(50))
    with patch.object(journal.os, "pwrite", failing):
        batch = await with_runner(folder, calls, until(folder, record, ended))
    assert not left[0] and results(folder, batch).keys() == {f"r{n}" for n in range(50)}


async def test_one_process_works_and_another_takes_its_place(tmp_path: Path) -> None:
    folder, first, second = Folder(tmp_path, 1 << 30), ScriptedCalls(0.002), ScriptedCalls(0.002)
    record = new_batch(folder, lines(300))
    one, other = (
        asyncio.create_task(Runner(folder, cast(OwnerCalls, calls), lambda: 4).run())
        for calls in (first, second)
    )
    await until(folder, record, lambda batch: batch.request_counts.completed > 20)
    assert not first.asked or not second.asked
    (one if first.asked else other).cancel()
    batch = await until(folder, record, ended)
    assert first.asked and second.asked and len(results(folder, batch)) == 300
    other.cancel()
    one.cancel()
    await asyncio.wait([one, other])


def test_a_folder_that_is_made_is_for_nobody_else(tmp_path: Path) -> None:
    Folder(tmp_path / "over" / "work", 1 << 30)
    assert {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "over").rglob("*")} == {0o700}
    assert stat.S_IMODE((tmp_path / "over").stat().st_mode) == 0o700


def test_what_has_expired_or_was_left_over_is_deleted(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1 << 30)
    upload = Upload(folder, 100)
    upload.write(b"abc")
    kept = upload.keep("", "a", "batch", 3600)
    upload.close()
    old = msgspec.structs.replace(kept, id="file-" + "0" * 32, expires_at=1)
    (folder.files / f"{old.id}.json").write_bytes(msgspec.json.encode(old))
    folder.file(old.id).write_bytes(b"x")
    torn = folder.files / "file-1.part"
    torn.write_bytes(b"x")
    folder.clean()
    assert torn.exists() and not folder.file(old.id).exists()
    with patch.object(time, "time", lambda: kept.at + 3599):
        folder.clean()
    with patch.object(time, "time", lambda: kept.at + 7200):
        assert [each.id for each in folder.records(folder.files, FileRecord)] == [kept.id]
        folder.clean()
    assert list(folder.files.iterdir()) == []


EVENT = st.tuples(st.floats(0.0, 0.02), st.sampled_from(["kill", "tear", "cancel", "expire", "nothing"]))


@settings(max_examples=25, deadline=None)
@given(st.lists(EVENT, max_size=5), st.integers(1, 60), st.integers(0, 1000))
def test_each_request_has_one_line_in_the_end(events: list[tuple[float, str]], count: int, seed: int) -> None:
    chance = random.Random(seed)

    async def live(folder: Folder, record: BatchRecord) -> Batch:
        """Do what the events say, and then wait for the end."""
        calls = ScriptedCalls(0.001)
        task = asyncio.create_task(Runner(folder, cast(OwnerCalls, calls), lambda: 4).run())
        for seconds, event in events:
            await asyncio.sleep(seconds)
            files = BatchFiles(folder, record.id)
            if event in ("kill", "tear"):
                task.cancel()
                await asyncio.wait([task])
                await asyncio.sleep(0.01)  # threads end that were writing
                # What has made it finalizing was on the disk before, which no kill undoes.
                if event == "tear" and state_of(files).status == "in_progress" and files.output.exists():
                    size = files.output.stat().st_size
                    with files.output.open("ab") as file:
                        file.truncate(chance.randint(max(0, size - 40), size))
                task = asyncio.create_task(Runner(folder, cast(OwnerCalls, calls), lambda: 4).run())
            elif event == "cancel" and not ended(shown(folder, record)):
                files.cancel.touch()
            elif event == "expire":
                record = msgspec.structs.replace(record, expires_at=1)
                files.record.write_bytes(msgspec.json.encode(record))
                task.cancel()
                await asyncio.wait([task])
                task = asyncio.create_task(Runner(folder, cast(OwnerCalls, calls), lambda: 4).run())
        batch = await until(folder, record, ended)
        task.cancel()
        await asyncio.wait([task])
        return batch

    with tempfile.TemporaryDirectory() as path, patch.object(runner, "LOOK_SECONDS", 0.001):
        folder = Folder(Path(path), 1 << 30)
        batch = asyncio.run(live(folder, new_batch(folder, lines(count))))
        found = results(folder, batch)
        assert found.keys() == {f"r{n}" for n in range(count)}
        assert (
            batch.request_counts.completed + batch.request_counts.failed
            == count
            == batch.request_counts.total
        )
        left = {one["error"]["code"] for one in found.values() if one["error"]}
        assert left <= {"cancelled": {"batch_cancelled"}, "expired": {"batch_expired"}}.get(
            batch.status, set()
        )
