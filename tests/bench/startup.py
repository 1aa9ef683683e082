"""Seconds from `serve` to its first answer, to being ready, and to the first token.

    python tests/bench/startup.py [MODEL] [--runs N] [--output FILE] [serve options]

Beside them the floor: a process that imports torch and reads the weights once, and does nothing else. Each
run measures both, one after the other, so that their ratio is fair on a machine that others use too.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from programs import run_program

from models.checkpoint.hub import DEMO
from server.bench.serve_options import BenchError, write_result
from server.terminal.console import check_folder, parser_of
from server.terminal.own_server import OwnServer, own_server
from server.terminal.server_client import ServerError

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


def measure(model: str, serve_options: Sequence[str]) -> Start:
    folder = DEMO if model == "demo" else Path(model)
    floor = _seconds_of_floor(folder) if folder.is_dir() else None
    started = time.monotonic()
    try:
        with own_server([model, *serve_options]) as server:
            _wait_for_success(server, "GET", "/live")
            live = time.monotonic() - started
            _wait_for_success(server, "GET", "/ready")
            ready = time.monotonic() - started
            if not _succeeds(server, "POST", "/v1/completions", {"prompt": _TEXT, "max_tokens": 1}):
                _wait_for_success(server, "POST", "/v1/embeddings", {"input": _TEXT})
            return Start(floor, live, ready, time.monotonic() - started)
    except ServerError as error:
        raise BenchError(str(error)) from None


def medians(starts: Sequence[Start]) -> Start:
    floors = [start.floor for start in starts if start.floor is not None]
    return Start(
        statistics.median(floors) if floors else None,
        statistics.median(start.live for start in starts),
        statistics.median(start.ready for start in starts),
        statistics.median(start.first for start in starts),
    )


def _seconds_of_floor(folder: Path) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", _FLOOR, str(folder)], check=True)
    return time.monotonic() - started


def _wait_for_success(server: OwnServer, method: str, path: str, body: object = None) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not _succeeds(server, method, path, body):
        if time.monotonic() > deadline:
            raise BenchError(f"{path} gave no 200 in {_PATIENCE:.0f} s; try `serve` with these options")
        time.sleep(_BETWEEN)


def _succeeds(server: OwnServer, method: str, path: str, body: object = None) -> bool:
    reply = server.ask(method, path, body)
    return reply is not None and reply.status == 200


def _line(start: Start) -> str:
    times = f"answers {start.live:.2f} s   ready {start.ready:.2f} s   first token {start.first:.2f} s"
    if start.floor is None:
        return times
    return f"floor {start.floor:.2f} s   {times}   ratio {start.first / start.floor:.2f}"


def _parser(command: str) -> argparse.ArgumentParser:
    usage = "[MODEL] [--runs N] [--output FILE] [serve options]"
    parser = parser_of(command, "Start the server again and again, and measure how long it takes.", usage)
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="Folder or hub id.")
    parser.add_argument("--runs", type=int, default=6, metavar="N", help="How often (default: 6).")
    parser.add_argument("--output", metavar="FILE", help="File for the result as JSON.")
    return parser


if __name__ == "__main__":
    sys.exit(run_program(run, "resolve_checkpoint.py"))
