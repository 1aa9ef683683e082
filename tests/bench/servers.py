"""A side of the comparison: the command that serves a folder, and its server while it runs."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import work

NAME = "m"
"""The name under which every server serves its model."""

_PATIENCE = 600.0
_FOLDER = re.compile(r"(/[\w.@+-]+)+/")


@dataclass(frozen=True)
class Side:
    name: str
    about: str
    """A description for the page with the figures."""
    command: Callable[[Path, work.Model, int], Sequence[str]]
    """The command that serves the model in a folder at a port."""
    parts: tuple[str, ...] = work.PARTS
    """The parts of the comparison in which this side takes part."""
    env: dict[str, str] = field(default_factory=dict)
    room: int = 2048
    """Tokens of the longest sequence that this side takes."""


class DidNotStart(Exception):
    """An error with the last lines of a server's log, without the names of folders."""

    def __init__(self, what: str, log: str) -> None:
        lines = log.splitlines()[-12:]
        told = (_FOLDER.sub("…/", line)[:200] for line in lines)
        super().__init__("\n".join([f"{what}:", *told]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def succeeds(port: int, method: str, path: str, body: object = None) -> bool:
    """Whether a server answers this request with status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    try:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Server:
    """A side that serves one folder, until it is closed."""

    def __init__(self, side: Side, folder: Path, model: work.Model) -> None:
        self.side = side
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder.parent / f"{side.name}.log".replace(" ", "-")
        command = side.command(folder, model, self.port)
        self.ready_s = 0.0
        """Seconds from the start of the process until it was ready."""
        self._started = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **side.env},
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """The id of the process that was started, above all others."""
        return self._process.pid

    @property
    def http_pid(self) -> int:
        """The id of the process that speaks HTTP: ours is a child of the one that was started."""
        below = tree(self.pid)
        return next((pid for pid in below if "server.run.api_main" in command_of(pid)), self.pid)

    def wait_ready(self) -> None:
        while not succeeds(self.port, "GET", "/health"):
            self._check()
            time.sleep(0.01)
        self.ready_s = time.monotonic() - self._started

    def first_answer(self) -> float:
        """Seconds from the start of the process to a token, or to a vector."""
        ask = {"model": NAME, "prompt": "Hello", "max_tokens": 1}
        if not succeeds(self.port, "POST", "/v1/completions", ask):
            ask = {"model": NAME, "input": "Hello"}
            while not succeeds(self.port, "POST", "/v1/embeddings", ask):
                self._check()
                time.sleep(0.01)
        return time.monotonic() - self._started

    def pause(self) -> None:
        """Stops the server's processes, so that they take no core while another side is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in tree(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.resume()
        below = tree(self.pid)[1:]
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in below:  # that have outlived it
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _check(self) -> None:
        code = self._process.poll()
        if code is None and time.monotonic() - self._started < _PATIENCE:
            return
        what = f"it was not ready after {_PATIENCE:.0f} s" if code is None else f"it ended with {code}"
        raise DidNotStart(what, self._log.read_text(errors="replace"))


# Processor time and memory of processes, as Linux counts them.

_TICK = os.sysconf("SC_CLK_TCK")


def tree(root: int) -> list[int]:
    """The processes that descend from `root`, and itself."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for above in found:
        found += [pid for pid, parent in parents.items() if parent == above]
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def cpu_seconds(*pids: int) -> float:
    """Seconds of user and system time so far. A process that has ended meanwhile counts as nothing."""
    return sum(int(fields[11]) + int(fields[12]) for pid in pids if (fields := _stat(pid))) / _TICK


def resident_mib(*pids: int) -> float:
    """Bytes of memory that belong to them, shared pages in proportion (PSS)."""
    return sum(_pss_kib(pid) for pid in pids) / 1024


def _pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _stat(pid: int) -> list[str]:
    """The fields of a process's stat file after its name: state, parent, and so on; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
