"""Parent and child are real processes, and neither outlives the other."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live import PATIENCE, wait_until

from worker import child

ECHO = """
import sys
from worker import child
payload = child.adopt(int(sys.argv[1]))
sys.exit(len(payload) % 251)
"""

STUBBORN = """
import signal, sys
from pathlib import Path
from worker import child
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(child.adopt(int(sys.argv[1])).decode()).touch()
while True:
    signal.pause()
"""

PARENT = """
import sys
from worker import child
kept = child.start("child", sys.argv[1], sys.argv[2].encode())
print(kept.pid, flush=True)
sys.stdin.read()
"""


BREAKING = """
import sys, threading, time
from worker import child, logs
child.adopt(int(sys.argv[1]))
logs.setup("child", "info")
threading.Thread(target=lambda: 1 / 0, name="sums").start()
time.sleep(60)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which children can import the modules of this test."""
    programs = {"echo_child": ECHO, "stubborn_child": STUBBORN, "parent_process": PARENT}
    for name, code in {**programs, "breaking_child": BREAKING}.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def is_gone(pid: int) -> bool:
    """Whether a process has ended. A zombie counts: its new parent in a container may never reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_payload_arrives_and_the_end_is_seen(modules: Path) -> None:
    payload = b"x" * 1_000_000  # more than a socket holds
    process = child.start("echo", "echo_child", payload)
    assert process.ended_within(10)
    assert process.wait() == process.exit_code == len(payload) % 251
    assert select.select([process.sentinel], [], [], 0)[0], "the sentinel stays readable"


def test_a_child_that_dies_before_it_listens_is_not_an_error(modules: Path) -> None:
    process = child.start("broken", "no_such_module", b"x" * 1_000_000)
    assert process.ended_within(10)
    assert process.wait() == 1


@pytest.mark.parametrize(
    ("code", "clause"),
    [
        (child.BROKE, "it exited with code 1, and its log says why"),
        (child.CANNOT_START, "it exited with code 2, and its log says why"),
        (child.LEFT_ALONE, "it exited with code 3, and its log says why"),
        (4, "it exited with code 4 and did not say why"),
        (-(signal.SIGRTMIN + 1), f"it was ended by signal {signal.SIGRTMIN + 1}"),
        (-signal.SIGSEGV, "it was ended by SIGSEGV"),
        (-signal.SIGKILL, "it was ended by SIGKILL, most likely because memory ran out (`dmesg` tells)"),
    ],
)
def test_an_exit_code_is_put_into_words(code: int, clause: str) -> None:
    assert child.describe_exit(code) == clause


def test_stop_is_bounded_even_if_the_child_does_not_listen(modules: Path) -> None:
    up = modules / "up"
    process = child.start("stubborn", "stubborn_child", str(up).encode())
    wait_until(up.exists, 2)
    assert process.exit_code is None
    began = time.monotonic()
    assert process.stop(0.2) == -signal.SIGKILL
    assert time.monotonic() - began < 2 * PATIENCE


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_no_child_survives_its_parent(modules: Path, how: str) -> None:
    up = modules / "up"
    command = [sys.executable, "-P", "-m", "parent_process", "stubborn_child", str(up)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(up.exists, 2)
        if how == "killed":
            parent.kill()
        else:
            parent.stdin.close()
        parent.wait()
    deadline = time.monotonic() + 2 * PATIENCE
    while not is_gone(pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.01)


def test_without_the_kernels_help_the_lifeline_suffices(modules: Path) -> None:
    """Systems without PR_SET_PDEATHSIG have the lifeline alone; dropping the child's object closes it."""
    up = modules / "up"
    process = child.start("stubborn", "stubborn_child", str(up).encode())
    wait_until(up.exists, 2)
    popen = process._process  # pyright: ignore[reportPrivateUsage]
    del process
    assert popen.wait(timeout=60) == 1


def test_a_thread_that_breaks_takes_its_process_along(
    modules: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = child.start("breaking", "breaking_child", b"")
    assert process.ended_within(10)
    assert process.wait() == child.BROKE
    said = capfd.readouterr().err
    assert "the thread 'sums' has broken, and ends its process" in said
    assert said.splitlines()[-1].strip() == "ZeroDivisionError: division by zero"
