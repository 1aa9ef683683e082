"""The watcher's acts: what it tells of processes that stand still, and which it kills. Processes are fake."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from engine_core.watch import rules, watcher
from engine_core.watch.watcher import Watcher
from worker.child import Child
from worker.host.progress_page import ProgressPage, ProgressWriter


class FakeProcess:
    """A process that is killed at most, and whose id nobody has."""

    pid = 1 << 30

    def __init__(self) -> None:
        self.killed = asyncio.Event()
        self.killed_because = ""

    def kill(self) -> None:
        self.killed.set()


class Kept:
    """A process that is watched, and that writes what a test wants."""

    def __init__(self, path: Path) -> None:
        self.name = "the engine"
        self._path = path
        self.start()

    def start(self) -> None:
        self.page = ProgressPage(self._path)
        self.fake = FakeProcess()
        self.process = cast(Child, self.fake)
        self.writer = ProgressWriter(str(self._path))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watcher, "DUMP_SECONDS", 0.01)
    monkeypatch.setattr(rules, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(rules, "KILL_SECONDS", 1000.0)


@pytest_asyncio.fixture
async def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "engine-0.progress")


@pytest_asyncio.fixture
async def told(kept: Kept) -> AsyncIterator[list[bool]]:
    """What is said of the process, which is watched while the test runs."""
    told: list[bool] = []

    def note(one: Kept, stalled: bool) -> None:
        told.append(stalled)

    watching = asyncio.create_task(Watcher([kept], note).run())
    yield told
    watching.cancel()


async def soon(told: list[Any], expected: list[Any]) -> None:
    async with asyncio.timeout(60):
        while told[: len(expected)] != expected:  # what comes later does not matter
            await asyncio.sleep(0.005)


async def test_a_stall_is_told_and_its_end(
    kept: Kept, told: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        kept.writer.working(1, 20, 5.0, 0.0)
        await soon(told, [True])
        kept.writer.working(2, 20, 6.0, 0.0)
        await soon(told, [True, False])
        kept.writer.idle()
    assert f"process {os.getpid()} computes step 1, of 20 tokens" in caplog.text
    assert "the engine makes progress again" in caplog.text
    assert not kept.fake.killed.is_set()


async def test_whoever_hangs_for_long_is_killed_and_another_one_begins_anew(
    kept: Kept, told: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "KILL_SECONDS", 0.1)
    kept.writer.working(1, 20, 5.0, 0.0)
    first = kept.fake
    await asyncio.wait_for(first.killed.wait(), 60)
    assert first.killed_because == "it made no progress and was killed"
    assert told == [True]
    kept.start()
    await soon(told, [True, False])
    kept.writer.idle()
    await asyncio.sleep(0.1)
    assert told == [True, False] and not kept.fake.killed.is_set()


async def test_one_that_loads_is_left_alone(kept: Kept, told: list[bool]) -> None:
    await asyncio.sleep(0.2)
    assert told == [] and kept.page.read(0).pid == 0
