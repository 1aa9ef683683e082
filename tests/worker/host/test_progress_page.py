"""Pages in which processes show how their work goes on."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from worker.host import progress_page
from worker.host.progress_page import (
    IDLE,
    STARTING,
    WORKING,
    ProgressPage,
    ProgressWriter,
    StepProgress,
)


@pytest.fixture
def page(tmp_path: Path) -> ProgressPage:
    return ProgressPage(tmp_path / "engine-0.progress")


def test_a_new_page_says_that_its_process_starts(page: ProgressPage) -> None:
    [entry] = page.entries()
    assert (entry.pid, entry.state) == (0, STARTING)
    assert page.path.stat().st_mode & 0o777 == 0o600


def test_another_process_is_read(page: ProgressPage) -> None:
    code = (
        "import sys; from worker.host.progress_page import WORKING, ProgressWriter\n"
        "ProgressWriter(sys.argv[1], 1).write(WORKING, 5, 20, 1.5, 0.25)"
    )
    ProgressWriter(str(page.path)).idle()
    subprocess.run([sys.executable, "-c", code, page.path], check=True)
    own, other = page.entries()
    assert (own.pid, own.state) == (os.getpid(), IDLE)
    assert other[1:] == (WORKING, 5, 20, 1.5, 0.25) and other.pid not in (0, own.pid)


def test_a_process_that_is_stopped_while_it_writes_does_not_seem_to_start(page: ProgressPage) -> None:
    code = (
        "import sys; from worker.host.progress_page import WORKING, ProgressWriter\n"
        "writer, number = ProgressWriter(sys.argv[1]), 0\n"
        "while True: number += 1; writer.write(WORKING, number, 1, 1.5, 0.25)"
    )
    with subprocess.Popen([sys.executable, "-c", code, page.path]) as writing:
        while not page.read(0).pid:
            time.sleep(0.01)
        seen: set[tuple[int, int]] = set()
        while page.read(0).number < 500_000:
            seen.add(page.read(0)[:2])
        writing.kill()
    assert seen == {(writing.pid, WORKING)}


def test_whoever_wrote_before_writes_no_more(page: ProgressPage) -> None:
    old = ProgressWriter(str(page.path))
    fresh = ProgressPage(page.path)
    old.idle()
    assert fresh.read(0).pid == 0


def test_who_has_no_page_writes_nowhere(tmp_path: Path) -> None:
    ProgressWriter().idle()
    ProgressWriter(str(tmp_path / "gone")).idle()
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_step_is_shown(page: ProgressPage) -> None:
    steps = StepProgress(ProgressWriter(str(page.path)))
    steps.begin(1, 20, 0.5)
    first = page.read(0)
    assert first[1:4] == (WORKING, 1, 20) and first.usual == 0.5
    steps.begin(2, 30)
    assert page.read(0) == first
    steps.end()
    second = page.read(0)
    assert second[1:4] == (WORKING, 2, 30) and second.since >= first.since
    assert steps.since == second.since
    steps.end()
    assert page.read(0).state == IDLE


def test_planning_a_step_is_work(page: ProgressPage) -> None:
    steps = StepProgress(ProgressWriter(str(page.path)), plans=True)
    steps.begin(1, 20)
    steps.end()
    assert page.read(0)[1:4] == (WORKING, 1, 0)
    steps.rest()
    assert page.read(0).state == IDLE
    steps.wake()
    assert page.read(0)[1:4] == (WORKING, 0, 0)


def test_without_room_for_a_page_its_process_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(progress_page.os, "write", write)
    page = ProgressPage(tmp_path / "page")
    ProgressWriter(str(page.path)).idle()
    assert page.entries()[0].pid == 0 and "not watched" in caplog.text
    assert not page.path.exists(), "or its process would map pages that are nowhere"


def test_a_page_has_its_room_on_the_disk_before_it_is_written(page: ProgressPage) -> None:
    assert page.path.stat().st_blocks * 512 >= page.path.stat().st_size
