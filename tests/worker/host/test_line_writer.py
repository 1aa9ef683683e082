"""Lines are written in order by a thread; a reader that stops or a full disk costs lines, not time."""

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from live import PATIENCE

from worker.host.line_writer import MOST_LINES, LineWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        with suppress(OSError):  # the test may have closed it
            os.close(end)


def no_loss(lines: int) -> None:
    pytest.fail(f"{lines} lines were lost")


def line(number: int) -> bytes:
    return b"%d\n" % number


def test_lines_come_in_order_and_flush_waits_for_them(pipe: tuple[int, int]) -> None:
    reader, end = pipe
    writer = LineWriter(end, no_loss)
    for number in range(500):
        writer.put(line(number))
    writer.flush(10)
    assert os.read(reader, 65536) == b"".join(map(line, range(500)))
    assert writer.dropped == 0


def test_a_pipe_that_nobody_reads_takes_no_time_and_loses_what_is_too_much(pipe: tuple[int, int]) -> None:
    reader, end = pipe
    told: list[int] = []
    heard = threading.Event()

    def hear(lines: int) -> None:
        told.append(lines)
        heard.set()

    writer = LineWriter(end, hear)
    long = b"x" * 1023 + b"\n"
    began = time.monotonic()
    for _ in range(5000):
        writer.put(long)
    writer.flush(0.05)
    assert time.monotonic() - began < 2 * PATIENCE
    dropped = writer.dropped
    assert 5000 - MOST_LINES - 300 < dropped < 5000  # the pipe holds 64, the thread up to 100
    while not heard.is_set():
        assert set(os.read(reader, 65536).split(b"\n")[1:-1]) <= {long[:-1]}
    assert told == [dropped]
    os.close(reader)
    writer.flush(10)  # its thread is done with a descriptor that another test may get


def test_a_full_disk_counts_lines_and_is_not_told_of_them() -> None:
    with open("/dev/full", "wb") as full:
        writer = LineWriter(full.fileno(), no_loss)
        for number in range(20):
            writer.put(line(number))
        writer.flush(10)
    assert writer.dropped == 20


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = LineWriter(pipe[1], no_loss)
    writer.put(line(1))
    writer.flush(10)
    assert writer.dropped == 1


def test_a_file_that_another_process_made_non_blocking_is_waited_for(pipe: tuple[int, int]) -> None:
    reader, end = pipe
    os.set_blocking(end, False)
    writer = LineWriter(end, no_loss)
    for _ in range(200):
        writer.put(b"x" * 1023 + b"\n")
    got = 0
    while got < 200 * 1024:
        assert select.select([reader], [], [], 10)[0], "lines were lost"
        got += len(os.read(reader, 65536))
    writer.flush(10)
    assert writer.dropped == 0


def test_lines_longer_than_a_pipe_takes_at_once_are_whole(pipe: tuple[int, int]) -> None:
    reader, end = pipe
    writer = LineWriter(end, no_loss)
    sent = [b"a\n", b"b" * 10_000 + b"\n", b"c\n"]
    for each in sent:
        writer.put(each)
    writer.flush(10)
    assert os.read(reader, 65536) == b"".join(sent)
