"""What is damaged in the folder of batches stops nobody else, and is told by its name."""

import errno
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting_work import ScriptedCalls, ended, lines, new_batch, results, shown, until, with_runner

from server.batches import runner
from server.batches.conversations import Conversations
from server.batches.database import NAME
from server.batches.folder import Folder, PageRequest
from server.batches.records import BatchRecord, BatchTable
from server.batches.responses import KeptResponses

COUNT = 300


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(runner, "AGAIN_SECONDS", 0.01)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff\0" * (path.stat().st_size // 2 + 1))


def change_a_byte(path: Path) -> None:
    """The last line stays JSON, with another prompt."""
    data = path.read_bytes()
    path.write_bytes(data[:-5] + b"7" + data[-4:])


def remove(path: Path) -> None:
    path.unlink()


def folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo_in_its_place(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


OF_CONTENTS = [
    *(empty, cut, garbage, change_a_byte, remove, folder_in_its_place, fifo_in_its_place, link_to_nothing)
]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("damage", OF_CONTENTS)
async def test_a_batch_whose_input_is_damaged_fails_and_others_do_not(
    tmp_path: Path, damage: Callable[[Path], None], begun: bool
) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls(0.001)
    bad, good = new_batch(folder, lines(COUNT), owner="alice"), new_batch(folder, lines(20), owner="bob")
    if begun:
        await with_runner(
            folder, calls, until(folder, bad.id, lambda batch: batch.request_counts.completed > 10), most=2
        )
    damage(folder.content(bad.input_file_id))
    work = until(folder, bad.id, ended), until(folder, good.id, ended)
    failed = await with_runner(folder, calls, work[0])
    fine = await with_runner(folder, calls, work[1])
    assert failed.status == "failed" and failed.errors is not None
    [error] = failed.errors["data"]  # pyright: ignore[reportGeneralTypeIssues]
    assert error.code == "damaged_data" and f"files/{bad.input_file_id}.data" in error.message
    if begun:  # each line is in the output or in the errors
        found = results(folder, failed)
        assert found.keys() == {f"r{n}" for n in range(COUNT)}
        assert {one["error"]["code"] for one in found.values() if one["error"]} == {"batch_failed"}
    assert fine.status == "completed" and len(results(folder, fine)) == 20


@pytest.mark.parametrize("column", ["record", "state"])
@pytest.mark.parametrize("content", [b"", b"\xff{", None])
async def test_a_batch_whose_record_is_damaged_fails_and_others_do_not(
    tmp_path: Path, column: str, content: bytes | None
) -> None:
    folder, calls = Folder(tmp_path, 1 << 30), ScriptedCalls(0.001)
    bad, good = new_batch(folder, lines(COUNT)), new_batch(folder, lines(20))
    await with_runner(
        folder, calls, until(folder, bad.id, lambda batch: batch.request_counts.completed > 10), most=2
    )
    with folder.database.write() as writer:
        writer.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (content, bad.id))
    listed, _ = BatchTable(folder).page("", PageRequest(None, 10, newest_first=True))
    assert [each.record.id for each in listed] == [good.id, bad.id]
    new = new_batch(folder, lines(5))
    await with_runner(folder, calls, until(folder, new.id, ended))
    failed = await with_runner(folder, calls, until(folder, bad.id, ended))
    assert failed.status == "failed" and NAME in str(failed.errors)
    assert results(folder, failed).keys() == {f"r{n}" for n in range(COUNT)}
    assert (await with_runner(folder, calls, until(folder, good.id, ended))).status == "completed"


async def test_a_response_whose_record_is_damaged_fails(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1 << 30)
    kept = KeptResponses(folder, 60)
    for id, content in (("resp_a", "request"), ("resp_b", "answer")):
        kept.queue("", id, b'{"input": "a"}', b'{"status": "queued"}', streams=True)
        with folder.database.write() as writer:
            writer.execute(f"UPDATE responses SET {content} = ? WHERE id = ?", (b"\xff", id))

    async def wait() -> None:
        while kept.to_do():
            await runner.asyncio.sleep(0.01)

    await with_runner(folder, ScriptedCalls(), wait())
    for id in ("resp_a", "resp_b"):
        answer = bytes(kept.find("", id).answer)
        assert b'"failed"' in answer and b"is damaged" in answer


def used_folder(path: Path) -> BatchRecord:
    folder = Folder(path, 1 << 30)
    record = new_batch(folder, lines(2000))
    folder.database.close()
    return record


@pytest.mark.parametrize("damage", [empty, cut, garbage, remove, folder_in_its_place])
def test_a_damaged_database_is_refused_at_the_start(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    used_folder(tmp_path)
    damage(tmp_path / NAME)
    with pytest.raises(OSError, match=re.escape(str(tmp_path))) as refused:
        Folder(tmp_path, 1 << 30).check()
    assert damage is folder_in_its_place or "restore it" in (refused.value.strerror or "")


@pytest.mark.parametrize("name", [f"{NAME}-wal", f"{NAME}-shm"])
def test_garbage_beside_the_database_harms_nothing(tmp_path: Path, name: str) -> None:
    record = used_folder(tmp_path)
    (tmp_path / name).write_bytes(b"\xff\0" * 5000)
    Folder(tmp_path, 1 << 30).check()
    assert shown(Folder(tmp_path, 1 << 30), record.id).status == "validating"


async def test_a_batch_of_which_the_database_cannot_be_read_fails_and_others_do_not(tmp_path: Path) -> None:
    record, folder, calls = used_folder(tmp_path), Folder(tmp_path, 1 << 30), ScriptedCalls()
    with folder.database.write() as writer:
        values = [(record.id, number, f"r{number}", 0, 1, 1) for number in range(1, 2001)]
        writer.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?)", values)
        writer.execute("UPDATE batches SET state = ?", (b'{"status":"in_progress","total":2000}',))
        [page] = writer.execute("SELECT rootpage FROM sqlite_master WHERE name = 'lines'").fetchone()
    folder.database.close()
    with (tmp_path / NAME).open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    good = new_batch(Folder(tmp_path, 1 << 30), b"")
    failed = await with_runner(folder, calls, until(folder, record.id, ended))
    assert failed.status == "failed" and str(tmp_path / NAME) in str(failed.errors)
    await with_runner(folder, calls, until(folder, good.id, ended))


def test_a_folder_of_the_older_form_is_refused(tmp_path: Path) -> None:
    for name in ("files", "batches", "responses"):
        (tmp_path / name).mkdir()
    Folder(tmp_path, 1 << 30).check()  # nothing is in it
    (tmp_path / NAME).unlink()
    (tmp_path / "batches" / "batch_1.json").write_text("{}")
    with pytest.raises(OSError) as refused:
        Folder(tmp_path, 1 << 30).check()
    assert "older version" in (refused.value.strerror or "") and not (tmp_path / NAME).exists()


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    used_folder(tmp_path)
    with sqlite3.connect(tmp_path / NAME) as other:
        other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(OSError, match="another version"):
        Folder(tmp_path, 1 << 30).check()


def test_a_database_of_an_earlier_version_gets_what_that_did_not_have(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1 << 30)
    batch = new_batch(folder, lines(1))
    folder.database.close()
    with sqlite3.connect(tmp_path / NAME) as other:
        other.executescript("DROP TABLE items; DROP TABLE conversations; PRAGMA user_version = 1")
    other.close()
    folder = Folder(tmp_path, 1 << 30)
    folder.check()
    assert BatchTable(folder).find(batch.id, batch.owner)
    assert Conversations(folder).create("", {}, []).object == "conversation"


def test_a_full_disk_is_told_as_that_of_files_is_and_undoes_the_transaction(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1 << 30)
    new_batch(folder, lines(1))
    with pytest.raises(OSError) as full, folder.database.write() as writer:
        writer.execute("DELETE FROM batches")
        writer.execute("PRAGMA max_page_count = 1")
        writer.execute("INSERT INTO responses (owner, id, answer) VALUES ('', 'a', zeroblob(100000))")
    assert full.value.errno == errno.ENOSPC
    assert len(BatchTable(folder).to_do()) == 1


def test_room_that_is_free_is_given_back_to_the_disk(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1 << 30)
    with folder.database.write() as writer:
        writer.execute("INSERT INTO responses (owner, id, answer) VALUES ('', 'a', zeroblob(5000000))")
    assert folder.used() > 5_000_000
    with folder.database.write() as writer:
        writer.execute("DELETE FROM responses")
    assert folder.used() < 200_000
    folder.clean()
    folder.database.close()
    assert (tmp_path / NAME).stat().st_size < 200_000
