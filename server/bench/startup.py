"""`facet bench startup`: seconds from `serve` to its first answer, to being ready, and to the first token.

Beside them the floor: a process that imports torch and reads the weights once, and does nothing else. Each
run measures both, one after the other, so that their ratio is fair on a machine that others use too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from models.checkpoint.hub import DEMO
from server.bench.serve_options import BenchError, check_folder, write_result
from server.options.option_table import Parser

_FLOOR = (
    "import pathlib, sys, torch; [p.read_bytes() for p in pathlib.Path(sys.argv[1]).glob('*.safetensors')]"
)
_PATIENCE = 600.0
_BETWEEN = 0.005
"""Seconds between two requests to a server that does not listen yet."""
_TEXT = "Hello"


class Start(msgspec.Struct, frozen=True):
    """Seconds from the start of the server's process to its milestones."""

    floor: float | None
    """None where the model is not a folder whose weights could be read."""
    live: float
    """Seconds to the first answer of any kind."""
    ready: float
    first: float
    """Seconds to a token, or to a vector of a model that only pools."""


def run(arguments: Sequence[str], command: str) -> int:
    given, serve_options = _parser(command).parse_known_args(arguments)
    if given.runs < 1:
        raise BenchError("--runs must be at least 1")
    check_folder("--output", given.output)
    starts: list[Start] = []
    for _ in range(given.runs):
        starts.append(measure(given.model, serve_options))
        print(_line(starts[-1]), flush=True)
    if len(starts) > 1:
        print("medians: " + _line(medians(starts)))
    write_result(given.output, {"model": given.model, "runs": starts, "medians": medians(starts)})
    return 0


def medians(starts: Sequence[Start]) -> Start:
    def median(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    columns = {name: median([getattr(s, name) for s in starts]) for name in Start.__struct_fields__}
    return msgspec.convert(columns, Start)


def measure(model: str, serve_options: Sequence[str]) -> Start:
    folder = DEMO if model == "demo" else Path(model)
    floor = _seconds_of_floor(folder) if folder.is_dir() else None
    port = free_port()
    command = [sys.executable, "-P", "-m", "server.main", model, "--port", str(port), *serve_options]
    with tempfile.TemporaryFile("w+") as log:
        started = time.monotonic()
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            door = _Door(server, port, log)
            door.until("GET", "/live")
            live = time.monotonic() - started
            door.until("GET", "/ready")
            ready = time.monotonic() - started
            if not door.opens("POST", "/v1/completions", {"prompt": _TEXT, "max_tokens": 1}):
                door.until("POST", "/v1/embeddings", {"input": _TEXT})
            return Start(floor, live, ready, time.monotonic() - started)
        finally:
            server.terminate()
            server.wait()


def _seconds_of_floor(folder: Path) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", _FLOOR, str(folder)], check=True)
    return time.monotonic() - started


class _Door:
    """Sends requests to a server that may end before it answers."""

    def __init__(self, server: subprocess.Popen[bytes], port: int, log: TextIO) -> None:
        self._server = server
        self._port = port
        self._log = log

    def until(self, method: str, path: str, body: object = None) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not self.opens(method, path, body):
            if time.monotonic() > deadline:
                raise BenchError(f"{path} gave no 200 in {_PATIENCE:.0f} s; try `serve` with these options")
            time.sleep(_BETWEEN)

    def opens(self, method: str, path: str, body: object = None) -> bool:
        if self._server.poll() is not None:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines() or [f"exit code {self._server.returncode}"]
            errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
            raise BenchError(f"the server ended: {(errors or lines)[-1]}")
        return opens(self._port, method, path, body)


def _line(start: Start) -> str:
    times = f"answers {start.live:.2f} s   ready {start.ready:.2f} s   first token {start.first:.2f} s"
    if start.floor is None:
        return times
    return f"floor {start.floor:.2f} s   {times}   ratio {start.first / start.floor:.2f}"


def _parser(command: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=command,
        usage=f"{command} [MODEL] [--runs N] [--output FILE] [serve options]",
        description="Start the server again and again, and measure how long it takes.",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="Folder or hub id.")
    parser.add_argument("--runs", type=int, default=6, metavar="N", help="How often (default: 6).")
    parser.add_argument("--output", metavar="FILE", help="File for the result as JSON.")
    return parser


_PATIENCE = 600.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def opens(port: int, method: str, path: str, body: object = None) -> bool:
    """Whether the server answers this request with status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
