"""What is told of a thread: where it is, and how long it had no core."""

import os
import subprocess
import sys
import time

from worker.host.core_waits import CoreWaits, stack_of


def test_a_thread_that_shares_a_core_waits_for_it() -> None:
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    os.sched_setaffinity(0, {core})  # of this thread, and of the process that it starts
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        waits = CoreWaits()
        before, until = waits.seconds, time.monotonic() + 60
        while waits.update() < before + 0.05:
            assert time.monotonic() < until
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, allowed)


def test_a_thread_that_is_no_more_has_no_stack() -> None:
    assert stack_of(0) == ""
