"""What bodies of every shape cost the process that serves: a table of its loop's delay and its memory.

    python tests/bench/bodies.py FOLDER [--only WORDS] [--shapes hostile|usual] [--mib 15]

Serves the checkpoint in FOLDER, which should have a context of some thousand tokens, sends one body at a
time, and reads from inside the API process for how long its event loop stood still: a task there sleeps for
5 ms, again and again, and writes down by how much it woke too late.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from body_shapes import HOSTILE, MIB, TEXT, USUAL, Shape  # noqa: E402
from live import LiveServer, serving  # noqa: E402

SETTLE = 1.0
"""Seconds after an answer until memory is read: what was freed has been given back by then."""

PROBE = """
import asyncio, os, time

folder = os.environ.get("LOOP_DELAYS")
if folder:
    try:
        import uvloop
    except ImportError:
        uvloop = None

    async def watch(path):
        with open(path, "a", buffering=1) as file:
            while True:
                began, used = time.monotonic(), time.thread_time()
                await asyncio.sleep(0.005)
                late = time.monotonic() - began - 0.005
                if late > 0.003:
                    file.write(f"{began} {late} {time.thread_time() - used}\\n")

    async def watched(main):
        task = asyncio.create_task(watch(f"{folder}/{os.getpid()}"))
        try:
            return await main
        finally:
            task.cancel()

    if uvloop is not None:
        run = uvloop.run
        uvloop.run = lambda main, **options: run(watched(main), **options)
"""


class Api:
    """The API process of a server, as seen from outside."""

    def __init__(self, server: LiveServer, delays: Path) -> None:
        self._server = server
        files = {int(file.name): file for file in delays.iterdir()}
        self.pid = max(files, key=lambda pid: b"server.run.api_process" in _command(pid))
        self._delays = files[self.pid]

    def memory(self) -> float:
        """The resident memory of the process in MiB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB

    def family(self) -> float:
        """The resident memory of processes in MiB that the API process has started and that hold no model."""
        total = 0
        for pid in self._server.children():
            if b"server.reading.helper_process" in _command(pid):
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE")
        return total / MIB

    def worst_delay(self, since: float) -> tuple[float, float]:
        """The longest that the loop stood still since then, and the longest that it computed, in ms.

        The second is less where other processes had the cores.
        """
        rows = [[float(word) for word in line.split()] for line in self._delays.read_text().splitlines()]
        found = [row[1:] for row in rows if row[0] >= since - 0.1]
        late, used = (max((row[i] for row in found), default=0.0) for i in (0, 1))
        return 1000 * late, 1000 * used

    def send(self, shape: Shape, body: bytes) -> tuple[int, str, float]:
        """Returns the answer's status, its error, and the seconds it took."""
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=300)
        began = time.monotonic()
        try:
            connection.request("POST", shape.path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
        except (BrokenPipeError, ConnectionResetError) as error:
            return 0, str(error), time.monotonic() - began
        finally:
            connection.close()
        took = time.monotonic() - began
        return answer.status, json.loads(data)["error"]["message"] if answer.status >= 400 else "", took


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def peak_of(api: Api, work: Callable[[], tuple[int, str, float]]) -> tuple[tuple[int, str, float], float]:
    """What `work` returns, and the most memory that the API process had meanwhile."""
    peak, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, api.memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return work(), peak
    finally:
        done.set()
        thread.join()


def rows(api: Api, shapes: list[Shape], mib: float | None) -> Iterator[list[str]]:
    for shape in shapes:
        body = shape.body(shape.size if mib is None else int(mib * MIB))
        before, since = api.memory(), time.monotonic()
        (status, message, took), peak = peak_of(api, partial(api.send, shape, body))
        time.sleep(SETTLE)
        late, used = api.worst_delay(since)
        yield [
            shape.name,
            shape.path,
            f"{len(body) / MIB:.2f}",
            str(status),
            f"{took:.2f}",
            f"{late:.0f}",
            f"{used:.0f}",
            f"{peak - before:+.0f}",
            f"{api.memory() - before:+.0f}",
            f"{api.family():.0f}",
            f"{len(message)}: {message[:60]!r}" if message else "",
        ]


HEAD = [
    "body",
    "path",
    "MiB",
    "status",
    "s",
    "late ms",
    "busy ms",
    "peak MiB",
    "lasting MiB",
    "helper MiB",
    "message",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--shapes", default="hostile", choices=("hostile", "usual"))
    parser.add_argument("--mib", type=float, help="size of hostile bodies; default: what each endpoint takes")
    parser.add_argument("--flags", default="")
    options = parser.parse_args()
    shapes = [one for one in (HOSTILE if options.shapes == "hostile" else USUAL) if options.only in one.name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(PROBE)
        delays = Path(folder) / "delays"
        delays.mkdir()
        path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {"LOOP_DELAYS": str(delays), "PYTHONPATH": path}
        with serving(str(options.folder), *options.flags.split(), env=env) as server:
            server.wait_ready()
            api = Api(server, delays)
            for _ in range(3):
                api.send(Shape("warm", TEXT, bytes), b'{"prompt":"hi","max_tokens":1}')
            print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
            for row in rows(api, shapes, options.mib):
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
