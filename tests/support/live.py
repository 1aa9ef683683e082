"""A real server for end-to-end tests: the command itself, as its own processes, on a free port."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from ports import free_ports

COMMAND = [sys.executable, "-P", "-c", "from server.main import serve; serve()"]
SMALL = ("--kv-cache-memory-bytes", "64M", "--dtype", "float32", "--restart-wait", "60")
"""Flags of a server that need not hold much, and whose requests wait for processes that are started again."""
WATCHED = ("--debug-event-loop", "--debug-steps")
"""Flags of a server whose log names what holds it up, which `holdups.py` reads."""
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
"""The body of a stream that lasts for a while."""


class LiveServer:
    def __init__(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        command: Sequence[str] = COMMAND,
        output: int | None = None,
        watched: bool = True,
    ) -> None:
        """`output` is a descriptor for what the server prints; without it that goes to `self.log`.

        `watched`: whether its log names what holds it up, which takes a little time itself.
        """
        self.port = free_ports()
        self.url = f"http://127.0.0.1:{self.port}"
        descriptor, path = tempfile.mkstemp(prefix="serve-", suffix=".log")
        os.close(descriptor)
        self.log = Path(path)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *args, *(WATCHED if watched else ()), "--port", str(self.port)],
                stdout=log if output is None else output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "FACET_CPU_THREADS": "1", "OMP_NUM_THREADS": "1", **(env or {})},
                start_new_session=True,
            )

    # `verify`: certificates, which nothing here needs, would be read for each request, in 30 ms.

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, verify=False)

    def post(self, path: str, body: object, timeout: float = 60) -> httpx.Response:
        """`body`: what is sent as JSON, or the bytes of it."""
        content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        headers = {"content-type": "application/json"}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=timeout, verify=False)

    def stream(self, path: str, body: object, timeout: float = 60) -> AbstractContextManager[httpx.Response]:
        return httpx.stream("POST", self.url + path, json=body, timeout=timeout, verify=False)

    def wait_ready(self, seconds: float = 60) -> LiveServer:
        wait_until(self._is_ready, seconds, lambda: f"not ready:\n{self.output()}")
        return self

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server exited with {self.process.returncode}:\n{self.output()}")
        try:
            return self.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """The process ids of all living descendants."""
        parent = {pid: _parent_of(pid) for pid in _process_ids()}
        found, frontier = [], [self.process.pid]
        while frontier:
            above = frontier.pop()
            below = [pid for pid, ppid in parent.items() if ppid == above]
            found += below
            frontier += below
        return found

    def engine_pids(self) -> list[int]:
        """The process ids of the engines, in the order in which they were started."""
        return self._running(b"engine_core.engine_main")

    def api_pids(self) -> list[int]:
        """The process ids of the API processes, in the order in which they were started."""
        return self._running(b"server.run.api_main")

    def rank_pids(self) -> list[int]:
        """The process ids of ranks that have processes of their own, in the order of their start."""
        return self._running(b"worker.rank_process")

    def _running(self, module: bytes) -> list[int]:
        found: list[int] = []
        for pid in sorted(self.children()):
            with suppress(FileNotFoundError, ProcessLookupError):
                if module in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def engine_pid(self) -> int:
        for pid in self.engine_pids():
            return pid
        raise RuntimeError("no engine process found")

    def numbers(self, name: str) -> dict[str, float]:
        """The values of a metric, by engine, or by "" if it is no engine's."""
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name + "{")]
        return {
            line.partition('engine="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines
        }

    def listening(self) -> set[tuple[str, int]]:
        """The IPv4 and IPv6 addresses and ports on which any of its processes listens."""
        pids = [self.process.pid, *self.children()]
        inodes = {
            os.readlink(file)
            for pid in pids
            for file in Path(f"/proc/{pid}/fd").iterdir()
            if file.is_symlink()
        }
        rows = [
            line.split()
            for table in ("/proc/net/tcp", "/proc/net/tcp6")
            for line in Path(table).read_text().splitlines()[1:]
        ]
        found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
        return {(_address(address), int(port, 16)) for address, port in found}

    def terminate(self, seconds: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        try:
            self.terminate()
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(60)
        finally:
            self.log.unlink(missing_ok=True)


@contextmanager
def serving(
    *args: str, env: dict[str, str] | None = None, command: Sequence[str] = COMMAND, watched: bool = True
) -> Iterator[LiveServer]:
    """A server that is ready. What it printed is shown if the test fails."""
    server = LiveServer(*args, env=env, command=command, watched=watched)
    try:
        yield server.wait_ready()
    except BaseException:
        print(server.output())
        raise
    finally:
        server.close()


@contextmanager
def starting(*args: str, **options: Any) -> Iterator[LiveServer]:
    """A server that has just been started, and may never become ready."""
    server = LiveServer(*args, **options)
    try:
        yield server
    finally:
        server.close()


def refusal(*args: str) -> str:
    """The error with which a server ends whose start is refused: exit code 2, and no traceback.

    Such a start takes three seconds; machines that run tests may be busy.
    """
    with starting(*args) as server:
        code, output = server.process.wait(60), server.output()
    from worker.logs import last_error  # environments of other makers' clients lack what this needs

    # Other processes may still tell how far the start has come.
    reason = last_error(output)
    if code != 2 or reason is None or output.count("error: ") != 1 or "Traceback" in output:
        raise ValueError(f"exit code {code}:\n{output}")
    return f"error: {reason}"


def complete(server: LiveServer, prompt: str = "Once upon a time", tokens: int = 8) -> str:
    """The greedy continuation of a prompt, which does not end before it has so many tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    if answer.status_code != 200:
        raise ValueError(answer.text)
    return answer.json()["choices"][0]["text"]


PATIENCE = 4
"""How much longer than on a machine that does nothing else something may take before a test fails."""
_LEAST_WAIT = 30.0
"""Seconds for which a test waits at least: a machine shared with others may stand still for many."""


def wait_until(condition: Callable[[], bool], seconds: float, message: Callable[[], str] | str = "") -> None:
    """Wait for what takes at most so many seconds on a machine that does nothing else."""
    deadline = time.monotonic() + max(PATIENCE * seconds, _LEAST_WAIT)
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(message() if callable(message) else message)
        time.sleep(0.02)


def listens(path: str) -> bool:
    """Whether a server accepts connections at this Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def alive(pid: int) -> bool:
    return _parent_of(pid) is not None


def _address(shown: str) -> str:
    """An address from the kernel's table, which has words of four bytes in the machine's order."""
    words = [bytes.fromhex(shown[start : start + 8])[::-1] for start in range(0, len(shown), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent_of(pid: int) -> int | None:
    """The process id of the parent; None if the process has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)


def events(response: httpx.Response) -> Iterator[str]:
    """The data of each server-sent event, `[DONE]` included."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def chunks(response: httpx.Response) -> list[dict]:
    found = list(events(response))
    if not found or found[-1] != "[DONE]":
        raise ValueError(f"the stream did not end with [DONE]: {found[-1:]}")
    return [json.loads(data) for data in found[:-1]]


def preemptions(server: LiveServer) -> float:
    """How often the engines of a server have preempted."""
    lines = server.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_preemptions_total")
    )


def keys(file: Path, *arguments: str) -> str:
    """Runs `facet keys`; returns what it prints."""
    command = [sys.executable, "-P", "-c", "from server.main import main; main()", "keys"]
    done = subprocess.run(
        [*command, *arguments, "--file", str(file)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()
