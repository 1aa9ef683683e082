"""The index of responses: who gives way to whom, and what it learns of other processes."""

from pathlib import Path

import pytest

from server.batches import response_index
from server.batches.folder import write_record
from server.batches.response_index import Entry, ResponseIndex


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(response_index, "MOST_RESPONSES", 3)


def entry(at: float, owner: str = "alice", *, waits: bool = False, expires_at: float = 0.0) -> Entry:
    return Entry(id=f"resp_{at}", owner=owner, at=at, waits=waits, expires_at=expires_at)


def place(tmp_path: Path, name: object) -> Path:
    return tmp_path / f"{name}.json"


def test_the_oldest_of_the_same_owner_gives_way(tmp_path: Path) -> None:
    index = ResponseIndex(tmp_path)
    assert index.note(place(tmp_path, "bobs"), entry(0, "bob")) == []
    gone = [index.note(place(tmp_path, at), entry(at)) for at in range(1, 6)]
    assert gone == [[], [], [], [place(tmp_path, 1)], [place(tmp_path, 2)]]


def test_what_is_still_to_be_computed_stays_and_is_the_newest_when_it_has_ended(tmp_path: Path) -> None:
    index = ResponseIndex(tmp_path)
    index.note(place(tmp_path, "a"), entry(1, waits=True))
    for at in (2, 3):
        index.note(place(tmp_path, at), entry(at))
    assert index.waiting("alice") == 1
    assert index.note(place(tmp_path, 4), entry(4)) == [place(tmp_path, 2)]
    assert index.note(place(tmp_path, "a"), entry(5)) == [] and index.waiting("alice") == 0
    assert index.note(place(tmp_path, 6), entry(6)) == [place(tmp_path, 3)]


def test_what_other_processes_write_and_remove_is_found(tmp_path: Path) -> None:
    index = ResponseIndex(tmp_path)
    index.note(place(tmp_path, 9), entry(9))
    write_record(place(tmp_path, 9), entry(9))
    for at in (4, 3, 2, 1):
        write_record(place(tmp_path, at), entry(at))
    place(tmp_path, "damaged").write_bytes(b"{")
    assert index.refresh() == [place(tmp_path, 1), place(tmp_path, 2)]
    for at in (1, 2, 3):
        place(tmp_path, at).unlink()
    assert index.refresh() == []
    assert [index.note(place(tmp_path, at), entry(at)) for at in (10, 11)] == [[], [place(tmp_path, 4)]]


def test_what_is_noted_while_the_folder_is_read_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = ResponseIndex(tmp_path)
    for at in (1, 2):
        index.note(place(tmp_path, at), entry(at))
        write_record(place(tmp_path, at), entry(at))
    read = response_index.read_record

    def read_late(path: Path, kind: type[Entry]) -> Entry | None:
        index.note(place(tmp_path, 7), entry(7))
        index.drop("alice", place(tmp_path, 1))
        return read(path, kind)

    monkeypatch.setattr(response_index, "read_record", read_late)
    write_record(place(tmp_path, 3), entry(3))
    assert index.refresh() == []
    assert index.note(place(tmp_path, 8), entry(8)) == [place(tmp_path, 2)]


def test_what_has_expired_is_told_once(tmp_path: Path) -> None:
    index = ResponseIndex(tmp_path)
    index.note(place(tmp_path, 1), entry(1, expires_at=50.0))
    index.note(place(tmp_path, 2), entry(2, waits=True))
    assert index.take_expired(49.0) == [] and index.take_expired(50.0) == [place(tmp_path, 1)]
    assert index.take_expired(1e9) == []
