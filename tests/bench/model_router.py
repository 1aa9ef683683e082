"""Measures llama.cpp's router and our server with the same GGUF files, under requests to random ones.

    PYTHONPATH=.:tests/support python tests/bench/model_router.py LLAMA_SERVER GGUF GGUF GGUF \\
        [--requests 200] [--models-max 2] [--memory 2.5G]

llama.cpp bounds how many models are loaded (`--models-max`), our server what all processes take (`--memory`).
Reported of each: errors, times of requests, the most memory (PSS) of all processes, and the first token of
the first model when it was out.
"""

import argparse
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from live import LiveServer, serving, wait_until
from ports import free_ports
from several_models import Memory, first_tokens, post


class Router(LiveServer):
    """llama.cpp's server, as far as it is measured."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port, self.url = process, port, f"http://127.0.0.1:{port}"


@contextmanager
def routing(program: str, folder: Path, most: int) -> Iterator[LiveServer]:
    port, threads = free_ports(), str(os.cpu_count() or 1)
    flags = (
        "--models-dir",
        str(folder),
        "--models-max",
        str(most),
        "--threads",
        threads,
        "--ctx-size",
        "8192",
    )
    with open(folder.parent / "router.log", "wb") as log:
        command = [program, *flags, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Router(process, port)
        wait_until(lambda: _is_there(server.url), 60)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _is_there(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def measure(title: str, server: LiveServer, names: list[str], given: argparse.Namespace) -> None:
    def ask(seed: int) -> tuple[float, str]:
        draw = random.Random(seed)
        body = {
            "model": draw.choice(names),
            "prompt": f"Once {seed}",
            "max_tokens": draw.randint(1, 24),
            "ignore_eos": True,
            "stream": draw.random() < 0.5,
        }
        began = time.monotonic()
        wrong = post(server.port, "/v1/completions", body)
        return time.monotonic() - began, wrong

    with Memory(server) as memory, ThreadPoolExecutor(given.at_once) as pool:
        began = time.monotonic()
        answers = list(pool.map(ask, range(given.requests)))
        took = time.monotonic() - began
        seconds, wrong = sorted(one for one, _ in answers), [one for _, one in answers if one]
        first = first_tokens(server, names[0])
    print(f"{title}: {given.requests} requests in {took:.0f} s, {len(wrong)} wrong {wrong[:2]}")
    print(f"  seconds: median {statistics.median(seconds):.2f}, p99 {seconds[int(0.99 * len(seconds))]:.2f}")
    print(f"  most memory {memory.most >> 20} MiB; first token of {names[0]} when it was out:", end=" ")
    print(*(f"{one:.2f}" for one in first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--models-max", type=int, default=2)
    parser.add_argument("--memory", default="2.5G")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "models"
        folder.mkdir()
        for file in given.files:
            (folder / file.name).symlink_to(file.resolve())
        names = [file.name.removesuffix(".gguf") for file in given.files]
        with routing(given.program, folder, given.models_max) as server:
            measure("llama.cpp", server, names, given)
        flags = ("--models", str(folder), "--memory", given.memory, "--disable-uvicorn-access-log")
        with serving(*flags, watched=False) as server:
            measure("facet", server, names, given)


if __name__ == "__main__":
    main()
