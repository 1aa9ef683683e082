"""Children of a fork server are like any others: they end with their parent, and it waits for them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import alive, wait_until

from server.run.fork_server import ForkServer, reap_others

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux gives children away")

CHILD = """
import os, sys, threading, time
from worker import child

def main():
    words = child.adopt(int(sys.argv[1])).decode().split()
    assert "loaded_first" in sys.modules
    if words[0] == "exit":
        return int(words[1])
    print(os.getpid(), os.getppid(), os.getpgid(0), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    import loaded_first
    sys.exit(main())
"""

PARENT = """
import select, sys
from server.run.fork_server import ForkServer
forks = ForkServer(["loaded_first"])
select.select([forks.descriptor], [], [])
forks.begin()
kept = forks.start("child", "forked_child", b"stay")
print(forks.works, forks.process.pid, kept.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in {"forked_child": CHILD, "loaded_first": "", "parent_process": PARENT}.items():
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


@pytest.fixture
def forks(modules: Path) -> Iterator[ForkServer]:
    found = ForkServer(["loaded_first"])
    found.begin()
    yield found
    found.process.kill()
    found.process.wait()


def test_a_child_is_forked_and_its_exit_code_is_known(forks: ForkServer) -> None:
    assert forks.works
    child = forks.start("child", "forked_child", b"exit 7")
    assert child.ended_within(60)
    assert (child.wait(), child.exit_code) == (7, 7)


def test_one_that_is_killed_is_known_by_its_signal_and_harms_no_other(forks: ForkServer) -> None:
    first, second = (forks.start("child", "forked_child", b"stay") for _ in range(2))
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert second.exit_code is None
    assert second.stop(60) == -signal.SIGTERM


def test_children_outlive_the_fork_server_and_others_are_started_without_it(forks: ForkServer) -> None:
    before = forks.start("child", "forked_child", b"stay")
    forks.process.kill()
    forks.process.wait()
    after = forks.start("child", "forked_child", b"exit 3")
    assert not forks.works
    assert after.wait() == 3
    assert before.exit_code is None
    assert before.stop(60) == -signal.SIGTERM


def test_what_is_prepared_once_is_there_in_all_children(modules: Path) -> None:
    (modules / "prepared.py").write_text("import sys\ndef prepare(): sys.modules['loaded_first'] = sys\n")
    forks = ForkServer([], ["prepared:prepare"])
    forks.begin()
    assert forks.start("child", "forked_child", b"exit 5").wait() == 5
    forks.process.kill()
    forks.process.wait()


def test_a_process_with_threads_is_never_forked(modules: Path) -> None:
    forks = ForkServer(["starts_a_thread"])
    forks.begin()
    assert not forks.works
    assert forks.start("child", "forked_child", b"exit 4").wait() == 4
    forks.process.wait()


def test_no_child_outlives_the_parent(modules: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "parent_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        lines = sorted((parent.stdout.readline().split() for _ in range(2)), key=lambda words: words[0])
        (pid, ppid, group), (works, server, kept) = lines
        assert (works, kept, ppid, group) == ("True", pid, str(parent.pid), pid)
        parent.kill()
        parent.wait()
    wait_until(lambda: not alive(int(pid)) and not alive(int(server)), 10)


def test_those_of_a_child_that_has_ended_are_waited_for(forks: ForkServer) -> None:
    """A process with a fork server is given what its children leave behind."""
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '0']).pid, flush=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    orphan = Path(f"/proc/{int(done.stdout)}")

    def is_gone() -> bool:
        reap_others({forks.process.pid})
        return not orphan.exists()

    wait_until(is_gone, 10)
