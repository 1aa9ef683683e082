"""Measures five models in one budget of memory, under requests to random ones.

    PYTHONPATH=.:tests/support python tests/bench/several_models.py [--memory 2.5G] [--requests 1000]

The models: the demo model, MiniLM, a reranker, and random weights in the shapes of Llama 135M and Qwen3 0.6B.
Half of the generating requests stream. Reported: errors, streams that broke, the most memory (PSS) of all
processes, the times of requests, and the first token of the 135M model when it was out.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checkpoints import make
from live import LiveServer, serving

from worker.host.machine import own_memory
from worker.options import share_or_size

GENERATE = ("demo", "llama-135m", "qwen3-0.6b")
POOL = ("minilm", "reranker")
LOADS = 5


def post(port: int, path: str, body: dict[str, Any], first: Callable[[], None] = lambda: None) -> str:
    """What is wrong with an answer, or an empty text; `first` is called at the first event of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        lines = list[bytes]()
        for line in answer:
            if line.startswith(b"data: ") and not lines:
                first()
            if line.strip() and not line.startswith(b":"):
                lines.append(line)
    except (OSError, http.client.HTTPException) as error:
        return f"{path}: {error!r}"
    finally:
        connection.close()
    if answer.status != 200:
        return f"{path}: {answer.status} {b''.join(lines)[:200]!r}"
    if body.get("stream") and (not lines or lines[-1].strip() != b"data: [DONE]"):
        return f"{path}: the stream broke off: {lines[-1:]}"
    return ""


def random_request(port: int, seed: int) -> tuple[float, str]:
    """The seconds of a request to a random model, and what was wrong with it."""
    draw = random.Random(seed)
    name = draw.choice(GENERATE + POOL)
    began = time.monotonic()
    if name == "minilm":
        wrong = post(port, "/v1/embeddings", {"model": name, "input": [f"a text {seed}"] * 3})
    elif name == "reranker":
        wrong = post(port, "/rerank", {"model": name, "query": f"{seed}", "documents": ["a", "b", "c"]})
    else:
        body = {
            "model": name,
            "prompt": f"Once {seed}",
            "max_tokens": draw.randint(1, 24),
            "ignore_eos": True,
        }
        wrong = post(port, "/v1/completions", {**body, "stream": draw.random() < 0.5})
    return time.monotonic() - began, wrong


class Memory:
    """Looks at the memory of all processes of a server again and again."""

    def __init__(self, server: LiveServer) -> None:
        self.most = 0
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def now(self) -> int:
        return sum(own_memory(pid) for pid in (self._server.process.pid, *self._server.children()))

    def _look(self) -> None:
        while not self._over.wait(0.25):
            self.most = max(self.most, self.now())


def first_tokens(server: LiveServer, name: str) -> list[float]:
    """The seconds to the first token of a model that was out."""
    found = list[float]()
    for number in range(LOADS):
        post(server.port, "/models/unload", {"model": name})
        body = {
            "model": name,
            "prompt": f"Once {number}",
            "max_tokens": 2,
            "ignore_eos": True,
            "stream": True,
        }
        began, came = time.monotonic(), list[float]()
        if wrong := post(
            server.port, "/v1/completions", body, lambda came=came: came.append(time.monotonic())
        ):
            print(wrong)
        found += [at - began for at in came]
    return found


def cost_of_a_second_model(server: LiveServer, memory: Memory) -> int:
    """What MiniLM takes beside the demo model and beside its weights, with the server's part of it."""
    for name in GENERATE + POOL:
        post(server.port, "/models/unload", {"model": name})
    post(server.port, "/models/load", {"model": "demo"})
    time.sleep(1)
    before = memory.now()
    post(server.port, "/models/load", {"model": "minilm"})
    time.sleep(1)
    return memory.now() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", default="2.5G")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "facet" / "several-models"
    parser.add_argument("--folder", type=Path, default=cache)
    given = parser.parse_args()
    budget, lines = share_or_size(given.memory), list[str]()
    for name in GENERATE + POOL:
        folder = given.folder / name
        if name != "demo" and not (folder / "config.json").exists():
            make(name, folder)
        lines += ["[[models]]", f'model = "{name if name == "demo" else folder}"', f'name = "{name}"']
    file = given.folder / "models.toml"
    file.write_text("\n".join(lines))
    threads = str(os.cpu_count() or 1)
    flags = ("--models", str(file), "--memory", given.memory, "--disable-uvicorn-access-log")
    variables = {"FACET_CPU_THREADS": threads, "OMP_NUM_THREADS": threads}
    with serving(*flags, env=variables, watched=False) as server, Memory(server) as memory:
        began = time.monotonic()
        with ThreadPoolExecutor(given.at_once) as pool:
            answers = list(pool.map(lambda seed: random_request(server.port, seed), range(given.requests)))
        took = time.monotonic() - began
        wrong = [one for _, one in answers if one]
        seconds = sorted(one for one, _ in answers)
        loads = server.output().count("is loaded, and takes")
        print(f"{given.requests} requests in {took:.0f} s, {loads} loads, {len(wrong)} wrong: {wrong[:3]}")
        print(
            f"seconds: median {statistics.median(seconds):.2f}, p99 {seconds[int(0.99 * len(seconds))]:.2f}"
        )
        print(f"most memory {memory.most >> 20} MiB of {int(budget) >> 20}: {memory.most / budget:.3f}")
        print(
            "first token of llama-135m when it was out:",
            *(f"{one:.2f}" for one in first_tokens(server, "llama-135m")),
        )
        beside = cost_of_a_second_model(server, memory)
        print(f"MiniLM beside the demo model takes {beside >> 20} MiB, of which 86 are weights")


if __name__ == "__main__":
    main()
