"""The same requests to servers of two checkouts of this repository, in turns: a table in Markdown.

    python tests/bench/commits.py OLDER NEWER [--model demo] [--turns 100] [--clients '[1, 8, 32]']

Each checkout is a folder with its own files (`git worktree add`); both run with the same packages. In each
turn as many clients as are named ask both the same at once, first one server and then the other, so that a
busy machine slows down both. Times are the medians; ratios (above 1: the newer one is slower) are the medians
of the ratios of turns.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from servers import free_port, succeeds

_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, "model": "m"}
_LONG = {"prompt": "The city lies on a river", "max_tokens": 48, "ignore_eos": True, "temperature": 0}
REQUESTS: dict[str, tuple[str, dict[str, object]]] = {
    "a short chat": ("/v1/chat/completions", _CHAT),
    "one token": ("/v1/completions", {"prompt": "The city", "max_tokens": 1, "temperature": 0, "model": "m"}),
    "a stream of 48 tokens": ("/v1/completions", {**_LONG, "stream": True, "model": "m"}),
    "an embedding": ("/v1/embeddings", {"input": "hello there", "model": "m"}),
    "64 embeddings": ("/v1/embeddings", {"input": [f"text number {n}" for n in range(64)], "model": "m"}),
}


class Checkout:
    """The server of one checkout."""

    def __init__(self, folder: Path, model: str, *more: str, clients: int = 1) -> None:
        """`more`: further options of the server."""
        self.port = port = free_port()
        start = "import sys; from server.main import main; sys.exit(main())"
        options = ["--port", str(port), "--served-model-name", "m", *more]
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, "serve", model, *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not succeeds(port, "GET", "/health"):
            if self._process.poll() is not None:
                raise SystemExit(f"{folder}: the server ended with {self._process.returncode}")
            time.sleep(0.2)
        self._connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(clients)]

    def seconds(self, path: str, body: str, clients: int, pool: ThreadPoolExecutor) -> float:
        """Returns how long it takes until so many clients, who ask at once, have their answers."""
        started = time.perf_counter()
        list(pool.map(lambda connection: _ask(connection, path, body), self._connections[:clients]))
        return time.perf_counter() - started

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def _ask(connection: http.client.HTTPConnection, path: str, body: str) -> None:
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    if response.status != 200:
        raise SystemExit(f"{path}: {text.decode()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("older", type=Path)
    parser.add_argument("newer", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--clients", type=json.loads, default=[1])
    given = parser.parse_args()
    sides = [
        Checkout(folder, given.model, clients=max(given.clients)) for folder in (given.older, given.newer)
    ]
    pool = ThreadPoolExecutor(max(given.clients))
    print("| | clients | older, ms | newer, ms | ratio |\n|---|---:|---:|---:|---:|")
    for clients in given.clients:
        for name, (path, request) in REQUESTS.items():
            body = json.dumps(request)
            for side in sides:
                side.seconds(path, body, clients, pool)
            count = max(5, given.turns // clients)
            turns = [[side.seconds(path, body, clients, pool) for side in sides] for _ in range(count)]
            older, newer = (statistics.median(times) * 1e3 for times in zip(*turns, strict=True))
            ratio = statistics.median(new / old for old, new in turns)
            print(f"| {name} | {clients} | {older:.2f} | {newer:.2f} | {ratio:.3f} |", flush=True)
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
