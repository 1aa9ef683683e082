"""Responses in the database: who gives way to whom, and what other processes see of it."""

from pathlib import Path

import msgspec
import pytest
from waiting_work import lines, new_batch

from server.batches import folder as folders
from server.batches import responses
from server.batches.folder import Folder
from server.batches.responses import KeptResponses
from server.errors import BadRequest, NotFound, TooManyRequests

ASKED, ANSWER, QUEUED = (
    b'{"input": "a"}',
    b'{"status": "completed"}',
    b'{"status": "queued", "background": true}',
)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(responses, "MOST_RESPONSES", 3)
    monkeypatch.setattr(folders, "MOST_RECORDS", 2)


def kept_of(kept: KeptResponses, owner: str, ids: str) -> str:
    found = ""
    for id in ids:
        try:
            found += kept.find(owner, id).id
        except NotFound:
            continue
    return found


def test_the_oldest_of_the_same_owner_gives_way_in_all_processes(tmp_path: Path) -> None:
    processes = [KeptResponses(Folder(tmp_path, 1 << 30), 60) for _ in range(2)]
    processes[0].keep("bob", "a", ASKED, ANSWER)
    for number, id in enumerate("abcdeb"):  # a client has given the id of an older one again
        processes[number % 2].keep("alice", id, ASKED, ANSWER)
    for kept in processes:
        assert kept_of(kept, "alice", "abcde") == "bde" and kept_of(kept, "bob", "a") == "a"


def test_what_is_still_to_be_computed_stays_and_is_the_newest_when_it_has_ended(tmp_path: Path) -> None:
    kept = KeptResponses(Folder(tmp_path, 1 << 30), 60)
    kept.queue("alice", "a", ASKED, QUEUED, streams=False)
    for id in "bcd":
        kept.keep("alice", id, ASKED, ANSWER)
    assert kept_of(kept, "alice", "abcd") == "acd"
    waiting = kept.waiting(kept.to_do()[0][0])
    assert waiting is not None
    kept.finish(waiting, msgspec.Raw(ANSWER), [])
    kept.keep("alice", "e", ASKED, ANSWER)
    assert kept_of(kept, "alice", "abcde") == "ade" and kept.to_do() == []


def test_so_many_may_wait_for_an_owner(tmp_path: Path) -> None:
    kept = KeptResponses(Folder(tmp_path, 1 << 30), 60)
    for id in "abc":
        kept.queue("alice", id, ASKED, QUEUED, streams=True)
    with pytest.raises(TooManyRequests):
        kept.queue("alice", "d", ASKED, QUEUED, streams=True)
    kept.queue("bob", "d", ASKED, QUEUED, streams=True)
    kept.cancel("alice", "a")
    kept.queue("alice", "d", ASKED, QUEUED, streams=True)
    assert kept_of(kept, "alice", "abcd") == "bcd"


def test_what_was_cancelled_is_not_written_over(tmp_path: Path) -> None:
    kept = KeptResponses(Folder(tmp_path, 1 << 30), 60)
    kept.queue("", "a", ASKED, QUEUED, streams=True)
    waiting = kept.waiting(kept.to_do()[0][0])
    assert waiting is not None
    kept.cancel("", "a")
    kept.go_on(waiting.number, [{"type": "late"}], ANSWER)
    kept.finish(waiting, msgspec.Raw(ANSWER), [{"type": "late"}])
    assert b"cancelled" in bytes(kept.find("", "a").answer)
    rows = kept.folder.database.read("SELECT kind FROM events ORDER BY number")
    assert [row["kind"] for row in rows] == ["response.created", "response.queued", "error"]


def test_files_and_batches_are_counted_by_owner(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1 << 30)
    for _ in range(2):
        new_batch(folder, lines(1), owner="alice")
    with pytest.raises(BadRequest, match="at most 2 of these for a key"):
        new_batch(folder, lines(1), owner="alice")
    new_batch(folder, lines(1), owner="bob")
