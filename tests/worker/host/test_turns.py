"""Processes compute in turn, and none waits for one that has ended or stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from worker.host.turns import Turns, make_page

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="robust mutexes are those of Linux")

HOLDER = """
import sys, time
from worker.host.turns import Turns
with Turns(sys.argv[1]).hold() as held:
    print(held, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def page(tmp_path: Path) -> str:
    make_page(tmp_path / "turns")
    return str(tmp_path / "turns")


def test_threads_are_never_inside_together_and_none_takes_all_turns(page: str) -> None:
    inside, order = 0, list[int]()

    def work(number: int) -> None:
        nonlocal inside
        turns = Turns(page, patience=60)
        for _ in range(50):
            with turns.hold() as held:
                inside += 1
                assert (held, inside) == (True, 1)
                order.append(number)
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 150
    both = order[: min(len(order) - 1 - order[::-1].index(number) for number in range(3))]
    assert sum(a == b for a, b in pairwise(both)) < len(both) / 2


def test_the_turn_of_a_process_that_is_killed_is_free(page: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, page], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        turns = Turns(page, patience=0.05)
        with turns.hold() as held:
            assert not held  # after which it goes on all the same
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    for _ in range(2):
        with turns.hold() as held:
            assert held
