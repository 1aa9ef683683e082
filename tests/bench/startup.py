"""Seconds from `serve` to the first token, beside the floor: `import torch` and one read of the weights.

    python tests/bench/startup.py MODEL_FOLDER [--runs 6]

Each run measures both, one after the other, so the ratio is fair on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SERVE = [sys.executable, "-P", "-c", "from server.main import serve; serve()"]
READ = "import pathlib, sys, torch; [p.read_bytes() for p in pathlib.Path(sys.argv[1]).glob('*.safetensors')]"


def floor(folder: Path) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", READ, str(folder)], check=True)
    return time.monotonic() - started


def start(folder: Path) -> tuple[float, float]:
    """Seconds to the first answer of any kind, and to the first token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([*SERVE, str(folder), "--port", str(port)], env=os.environ, **quiet)
    try:
        until_answered(f"{url}/live")
        live = time.monotonic() - started
        until_answered(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0})
        return live, time.monotonic() - started
    finally:
        server.terminate()
        server.wait()


def until_answered(url: str, body: object = None, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(request, timeout=seconds).read()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.01)
    raise TimeoutError(f"{url} did not answer in {seconds} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=6)
    arguments = parser.parse_args()
    rows = []
    for _ in range(arguments.runs):
        least = floor(arguments.folder)
        live, first = start(arguments.folder)
        rows.append((least, live, first, first / least))
        print("floor {:.2f} s   live {:.2f} s   first token {:.2f} s   ratio {:.2f}".format(*rows[-1]))
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print("medians: floor {:.2f} s   live {:.2f} s   first token {:.2f} s   ratio {:.2f}".format(*medians))


if __name__ == "__main__":
    main()
