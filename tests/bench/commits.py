"""The same requests to servers of two checkouts of this repository, in turns: a table in Markdown.

    python tests/bench/commits.py OLDER NEWER [--model demo] [--turns 300]

Each checkout is a folder with its own files (`git worktree add`); both run with the same packages. In each
turn both are asked the same, first one and then the other, so that a busy machine slows down both. Times are
the medians; ratios are the median of the ratios of turns.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from servers import free_port, succeeds

_CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0, "model": "m"}
REQUESTS: dict[str, tuple[str, dict[str, object]]] = {
    "a short chat": ("/v1/chat/completions", _CHAT),
    "a stream": ("/v1/chat/completions", {**_CHAT, "stream": True, "max_tokens": 32}),
    "an embedding": ("/v1/embeddings", {"input": "hello there", "model": "m"}),
}


class Checkout:
    """The server of one checkout."""

    def __init__(self, folder: Path, model: str, *more: str) -> None:
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
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def seconds(self, path: str, body: str) -> float:
        started = time.perf_counter()
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise SystemExit(f"{path}: {text.decode()}")
        return time.perf_counter() - started

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("older", type=Path)
    parser.add_argument("newer", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--turns", type=int, default=300)
    given = parser.parse_args()
    sides = [Checkout(folder, given.model) for folder in (given.older, given.newer)]
    print("| | older, ms | newer, ms | ratio |\n|---|---:|---:|---:|")
    for name, (path, request) in REQUESTS.items():
        body = json.dumps(request)
        for side in sides:
            side.seconds(path, body)
        turns = [[side.seconds(path, body) for side in sides] for _ in range(given.turns)]
        older, newer = (statistics.median(times) * 1e3 for times in zip(*turns, strict=True))
        ratio = statistics.median(new / old for old, new in turns)
        print(f"| {name} | {older:.2f} | {newer:.2f} | {ratio:.3f} |")
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
