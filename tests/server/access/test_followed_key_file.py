"""A file of keys that changes while it is used: all of it counts or nothing, and never a half of it."""

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from fake_connection import FakeClock

from server.access import key_file
from server.access.key_file import QUIET_SECONDS, FollowedKeyFile, Key

LONG = 60.0


class Followed:
    """A file that is looked at when a test says so."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, FakeClock()
        self.valid: list[str] = []
        self.file = FollowedKeyFile(path, self.use, self.clock.time)
        self.written = 0

    def use(self, keys: Sequence[Key]) -> None:
        self.valid = [key.name for key in keys]

    def write(self, *names: str, cut: int = 0) -> None:
        entries = [
            f'[[keys]]\nname = "{name}"\nsha256 = "{index:064x}"\n' for index, name in enumerate(names)
        ]
        text = "".join(entries)
        self.path.write_text(text[: len(text) - cut])
        self.written += 1
        os.utime(self.path, (0, self.written))  # clocks of file systems are coarse

    def look(self, after: float = 0.0) -> None:
        self.clock.now += after
        if self.file.has_changed():
            self.file.take(self.file.read())


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    one = Followed(tmp_path / "keys.toml")
    one.write("alice")
    one.file.take(one.file.read())
    assert one.valid == ["alice"]
    return one


def test_a_change_counts_when_the_file_has_been_quiet(followed: Followed) -> None:
    followed.write("alice", "bob")
    followed.look()
    followed.look(QUIET_SECONDS - 0.01)
    assert followed.valid == ["alice"]
    followed.look(0.02)
    assert followed.valid == ["alice", "bob"]


def test_a_file_that_is_being_written_is_not_read(followed: Followed) -> None:
    for _ in range(5):
        followed.write("alice", "bob", cut=100)  # a valid file, with one key too few
        followed.look()
        followed.look(QUIET_SECONDS / 2)
    assert followed.valid == ["alice"]
    followed.write("alice", "bob")
    followed.look()
    followed.look(QUIET_SECONDS)
    assert followed.valid == ["alice", "bob"]


def test_a_broken_file_leaves_what_was_valid_and_is_told_once(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.write("bob", cut=20)
    for _ in range(10):
        followed.look()
        followed.clock.now += QUIET_SECONDS
    assert followed.valid == ["alice"]
    [record] = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "what was valid stays valid" in record.getMessage() and "line 3" in record.getMessage()
    followed.write("bob")
    followed.look()
    followed.look(QUIET_SECONDS)
    assert followed.valid == ["bob"]


def test_a_file_that_vanishes_takes_no_key_with_it(followed: Followed) -> None:
    followed.path.unlink()
    for _ in range(3):
        followed.look()
        followed.clock.now += QUIET_SECONDS
    assert followed.valid == ["alice"]


async def until(condition: object) -> None:
    async with asyncio.timeout(LONG):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


async def test_it_is_read_when_that_is_asked_for(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_file, "LOOK_SECONDS", LONG)
    following = asyncio.create_task(followed.file.follow())
    followed.write("bob")
    followed.file.ask()
    await until(lambda: followed.valid == ["bob"])
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following


async def test_it_is_read_by_itself_when_it_has_changed(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file, "LOOK_SECONDS", 0.001)
    following = asyncio.create_task(followed.file.follow())
    followed.write("bob")
    while followed.valid != ["bob"]:
        followed.clock.now += 0.1
        await asyncio.sleep(0.001)
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
