"""Turns of an event loop, and what is said when they come late."""

# pyright: reportPrivateUsage=false
import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from holdups import holdups

from server.run import loop_watch
from server.run.loop_watch import LoopWatch
from worker.host.core_waits import stack_of
from worker.host.progress_page import WORKING, ProgressPage, ProgressWriter

pytestmark = pytest.mark.slow(2)


class Watched:
    """A watch over the running loop, and what it has measured."""

    def __init__(self, folder: Path, *, closely: bool = False) -> None:
        self.page = ProgressPage(folder / "api-0.progress")
        self.lags: list[float] = []
        self.busy = True
        writer = ProgressWriter(str(self.page.path))
        self.watch = LoopWatch(writer, self.lags.append, lambda: self.busy, closely=closely)

    async def turns(self, count: int) -> None:
        seen = len(self.lags)
        async with asyncio.timeout(60):
            while len(self.lags) < seen + count:
                await asyncio.sleep(0.01)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "BUSY_SECONDS", 0.02)


@pytest.mark.usefixtures("fast")
async def test_turns_are_shown_and_measured(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.page.read(0).pid == 0, "it has not begun"
    watched.watch.start()
    await watched.turns(3)
    entry = watched.page.read(0)
    assert (entry.state, entry.number) == (WORKING, len(watched.lags))
    watched.watch.stop()


async def test_without_requests_turns_are_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "IDLE_SECONDS", 1000.0)
    watched = Watched(tmp_path)
    watched.busy = False
    watched.watch.start()
    await asyncio.sleep(0.3)
    assert len(watched.lags) == 1
    watched.watch.stop()


async def held_up(watched: Watched, seconds: float, until: Callable[[], bool]) -> None:
    """Hold the loop up for so long, or until something is so, between two turns of it."""
    await watched.turns(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        time.sleep(0.05)
    await watched.turns(1)


@pytest.mark.usefixtures("fast")
async def test_what_holds_the_loop_up_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "WARNING_SECONDS", 0.0)
    watched = Watched(tmp_path)
    with caplog.at_level(logging.WARNING):
        watched.watch.start()
        await held_up(watched, 20, lambda: "held_up" in caplog.text)
    watched.watch.stop()
    assert "the event loop is behind by" in caplog.text and "held_up" in caplog.text
    assert max(watched.lags) > 0.2


@pytest.mark.usefixtures("fast")
async def test_one_warning_stands_for_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "WARNING_SECONDS", 1000.0)
    watched = Watched(tmp_path)
    with caplog.at_level(logging.WARNING):
        watched.watch.start()
        await held_up(watched, 20, lambda: bool(caplog.records))
        await held_up(watched, 1, lambda: False)
    watched.watch.stop()
    assert len(caplog.records) == 1


async def test_each_callback_above_fifty_milliseconds_is_named_if_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch.CoreWaits, "update", lambda waits: waits.seconds)
    watched = Watched(tmp_path, closely=True)
    with caplog.at_level(logging.WARNING):
        watched.watch.start()
        for count in (1, 2):
            async with asyncio.timeout(60):
                while len(caplog.records) < count:
                    await held_up(watched, 0.3, lambda: False)
    watched.watch.stop()
    [entry] = holdups(caplog.text)
    assert entry.startswith("the event loop: ") and entry.endswith("held_up")


async def test_a_loop_that_waits_is_not_named_while_cores_are_lacking(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch.CoreWaits, "update", lambda waits: waits.seconds + 9.0)
    watched = Watched(tmp_path, closely=True)
    with caplog.at_level(logging.WARNING):
        watched.watch.start()
        await held_up(watched, 0.3, lambda: False)
        await watched.turns(2)
    watched.watch.stop()
    assert not caplog.records


async def test_a_warning_keeps_nothing_of_what_was_running(tmp_path: Path) -> None:
    class Held:
        pass

    watch = Watched(tmp_path).watch

    def warn() -> weakref.ref[Held]:
        held = Held()
        watch._warn(1.0, stack_of(threading.main_thread().ident or 0))
        return weakref.ref(held)

    gc.disable()
    try:
        assert (await asyncio.to_thread(warn))() is None
    finally:
        gc.enable()
