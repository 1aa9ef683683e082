"""Batches over a scripted server, under random cancels, ends of their time, kills and refusals."""

import asyncio
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting_work import ScriptedCalls, ended, lines, new_batch, results, shown, until, with_runner

from server.batches import batch_run, runner
from server.batches.app_call import OwnerCalls
from server.batches.database import Database
from server.batches.folder import LEFT_OVER_SECONDS, Folder, PageRequest, Upload, add_file
from server.batches.records import Batch, BatchTable
from server.batches.runner import Runner
from server.errors import BadRequest


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(runner, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(batch_run, "_FULL_SECONDS", 0.01)


async def test_answers_and_refusals_are_files_of_their_own(tmp_path: Path) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls(0.001)
    record = new_batch(folder, lines(200), owner="alice")
    batch = await with_runner(folder, calls, until(folder, record.id, ended))
    assert batch.status == "completed" and batch.request_counts.total == 200
    assert (batch.request_counts.completed, batch.request_counts.failed) == (172, 28)
    found = results(folder, batch)
    assert found.keys() == {f"r{n}" for n in range(200)}
    assert found["r5"]["response"]["body"] == {"text": "5"} and found["r5"]["error"] is None
    assert found["r6"]["response"]["status_code"] == 400
    assert {owner for owner, _ in calls.asked} == {"alice"} and calls.most == 8
    assert folder.find_file(batch.output_file_id or "", "alice").purpose == "batch_output"
    [[left]] = folder.database.read("SELECT (SELECT count(*) FROM lines) + (SELECT count(*) FROM results)")
    assert left == 0
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
            b'{"custom_id": "x", "url": "/v1/embeddings", "body": {"encoding_format": "bytes"}}\n',
            "invalid_request",
            1,
        ),
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
        batch = await with_runner(folder, calls, until(folder, record.id, ended))
    assert batch.status == "failed" and batch.errors is not None and not calls.asked
    (error,) = cast("list[batch_run.BatchError]", batch.errors["data"])
    assert (error.code, error.line) == (code, line) and error.message


async def test_batches_of_owners_take_turns(tmp_path: Path) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls(0.001)
    long = new_batch(folder, lines(2000), owner="alice")
    short = new_batch(folder, lines(10), owner="bob")
    await with_runner(folder, calls, until(folder, short.id, ended))
    assert not ended(shown(folder, long.id))


async def test_a_full_folder_makes_a_batch_wait(tmp_path: Path) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls()
    record = new_batch(folder, lines(3))
    folder.most_bytes = 10

    async def wait() -> Batch:
        await until(folder, record.id, lambda batch: batch.status == "in_progress")
        await asyncio.sleep(0.05)
        assert not calls.asked
        folder.most_bytes = 1 << 30
        return await until(folder, record.id, ended)

    assert len(results(folder, await with_runner(folder, calls, wait()))) == 3


async def test_a_disk_that_fails_for_a_while_loses_nothing(tmp_path: Path) -> None:
    folder, calls, tried = Folder(tmp_path, 1 << 30), ScriptedCalls(), [0]
    real = Database.write

    @contextmanager
    def failing(self: Database, *, durable: bool = True) -> Iterator[Any]:
        with real(self, durable=durable) as writer:
            yield writer
            tried[0] += 1
            if tried[0] in (1, 3, 6, 8, 9):
                raise OSError(28, "No space left on device")

    record = new_batch(folder, lines(50))
    with patch.object(Database, "write", failing):
        batch = await with_runner(folder, calls, until(folder, record.id, ended))
    assert tried[0] > 9 and results(folder, batch).keys() == {f"r{n}" for n in range(50)}


async def test_one_process_works_and_another_takes_its_place(tmp_path: Path) -> None:
    folder, first, second = Folder(tmp_path, 1 << 30), ScriptedCalls(0.002), ScriptedCalls(0.002)
    record = new_batch(folder, lines(300))
    one, other = (
        asyncio.create_task(Runner(folder, cast(OwnerCalls, calls), lambda: 4).run())
        for calls in (first, second)
    )
    await until(folder, record.id, lambda batch: batch.request_counts.completed > 20)
    assert not first.asked or not second.asked
    (one if first.asked else other).cancel()
    batch = await until(folder, record.id, ended)
    assert first.asked and second.asked and len(results(folder, batch)) == 300
    other.cancel()
    one.cancel()
    await asyncio.wait([one, other])


def test_a_folder_that_is_made_is_for_nobody_else(tmp_path: Path) -> None:
    Folder(tmp_path / "over" / "work", 1 << 30).database.open()
    for each in [tmp_path / "over", *(tmp_path / "over").rglob("*")]:
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600)


def test_what_has_expired_or_was_left_over_is_deleted(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1 << 30)
    upload = Upload(folder, 100, "")
    upload.write(b"abc")
    kept = upload.keep("a", "batch", 3600)
    upload.close()
    old = msgspec.structs.replace(kept, id="file-" + "0" * 32, expires_at=1)
    with folder.database.write() as writer:
        add_file(writer, old)
    folder.content(old.id).write_bytes(b"x")
    left_over = folder.files / "file-1.data"
    left_over.write_bytes(b"x")
    folder.clean()
    assert left_over.exists() and not folder.content(old.id).exists()
    os.utime(left_over, (0, time.time() - LEFT_OVER_SECONDS - 1))
    folder.clean()
    assert [path.stem for path in folder.files.iterdir()] == [kept.id]
    with patch.object(time, "time", lambda: kept.at + 3601):
        assert folder.list_files("", PageRequest(None, 10, newest_first=True), None) == ([], False)
        folder.clean()
    assert list(folder.files.iterdir()) == []


async def test_an_input_that_is_deleted_stays_until_its_batch_has_ended(tmp_path: Path) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls(0.001)
    record = new_batch(folder, lines(20))
    folder.delete_file(record.input_file_id)
    assert (
        folder.list_files("", PageRequest(None, 10, newest_first=True), None) == ([], False)
        and folder.content(record.input_file_id).exists()
    )

    async def wait() -> Batch:
        batch = await until(folder, record.id, ended)
        async with asyncio.timeout(20):
            while folder.content(record.input_file_id).exists():
                await asyncio.sleep(0.005)
        return batch

    assert len(results(folder, await with_runner(folder, calls, wait()))) == 20


EVENT = st.tuples(st.floats(0.0, 0.02), st.sampled_from(["kill", "cancel", "expire", "nothing"]))


@settings(max_examples=25, deadline=None)
@given(st.lists(EVENT, max_size=5), st.integers(1, 60))
def test_each_request_has_one_line_in_the_end(events: list[tuple[float, str]], count: int) -> None:
    async def live(folder: Folder, id: str) -> Batch:
        """Do what the events say, and then wait for the end."""
        table, calls = BatchTable(folder), cast(OwnerCalls, ScriptedCalls(0.001))
        task = asyncio.create_task(Runner(folder, calls, lambda: 4).run())
        for seconds, event in events:
            await asyncio.sleep(seconds)
            if event == "cancel" and not ended(shown(folder, id)):
                with suppress(BadRequest):  # it ends at this moment
                    table.cancel(id, "")
            elif event == "expire":
                record = msgspec.structs.replace(table.find(id, "").record, expires_at=1)
                with folder.database.write() as writer:
                    writer.execute("UPDATE batches SET record = ?", (msgspec.json.encode(record),))
            if event in ("kill", "expire"):  # threads that write may still do so beside the next runner
                task.cancel()
                await asyncio.wait([task])
                task = asyncio.create_task(Runner(folder, calls, lambda: 4).run())
        batch = await until(folder, id, ended)
        task.cancel()
        await asyncio.wait([task])
        return batch

    with tempfile.TemporaryDirectory() as path, patch.object(runner, "LOOK_SECONDS", 0.001):
        folder = Folder(Path(path), 1 << 30)
        batch = asyncio.run(live(folder, new_batch(folder, lines(count)).id))
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
