"""Measures how a real server is shared between two keys: `python tests/bench/key_shares.py`.

Two keys of the weights 1 and 3 ask for more than the server can do, and the tokens that each gets in ten
seconds are counted, after a ramp of ten. Then one key has a thousand requests waiting while another one sends
one at a time, whose latency is compared with that on an idle server.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from live import LiveServer, listens, wait_until

WEIGHTS = {"one": 1, "three": 3}
SLOTS = 16
SHORT = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}


def write_keys(path: Path) -> None:
    entries = [
        f'[[keys]]\nname = "{name}"\nweight = {weight}\n'
        f'sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
        for name, weight in WEIGHTS.items()
    ]
    path.write_text("".join(entries))


async def ask(socket: str, name: str, body: dict[str, object]) -> AsyncIterator[bytes]:
    """The pieces of an answer. This client costs little, as it shares the machine with the server."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {name}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(head.encode() + b"\r\n" + data)
        while piece := await reader.read(1 << 16):
            yield piece
    finally:
        writer.close()


class Load:
    """Streams without end, and the tokens that each key has got."""

    def __init__(self, socket: str, streams: int, max_tokens: int) -> None:
        self._socket = socket
        self._max_tokens = max_tokens
        self.tokens = Counter[str]()
        self._tasks = [
            asyncio.create_task(self._ask(name, number)) for name in WEIGHTS for number in range(streams)
        ]

    async def _ask(self, name: str, number: int) -> None:
        body = {**SHORT, "max_tokens": self._max_tokens, "stream": True, "seed": number}
        while True:
            async for piece in ask(self._socket, name, body):
                self.tokens[name] += piece.count(b'data: {"id"')

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def shares(socket: str, max_tokens: int) -> None:
    load = Load(socket, 2 * SLOTS, max_tokens)
    await asyncio.sleep(10)
    before = load.tokens.copy()
    await asyncio.sleep(10)
    got = {name: load.tokens[name] - before[name] for name in WEIGHTS}
    await load.stop()
    ratio = got["three"] / max(1, got["one"])
    print(f"answers of {max_tokens} tokens: {got} in 10 s, 1 : {ratio:.3f}", flush=True)


async def latency(socket: str, name: str, max_tokens: int) -> float:
    began = time.monotonic()
    answer = b"".join([piece async for piece in ask(socket, name, {**SHORT, "max_tokens": max_tokens})])
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer.decode())
    return time.monotonic() - began


async def crowd(socket: str, requests: int) -> None:
    base = [await latency(socket, "one", 8) for _ in range(20)]
    many = [asyncio.create_task(latency(socket, "three", 128)) for _ in range(requests)]
    await asyncio.sleep(3)
    single: list[float] = []
    while len(single) < 20 and not all(task.done() for task in many):
        single.append(await latency(socket, "one", 8))
    left = sum(not task.done() for task in many)
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    print(
        f"one request at a time: {1000 * statistics.median(base):.0f} ms alone, beside {requests} of another "
        f"key {1000 * statistics.median(single):.0f} ms (median of {len(single)}, the longest "
        f"{1000 * max(single):.0f} ms; {left} of the others were left)",
        flush=True,
    )


async def measure(socket: str, requests: int) -> None:
    for max_tokens in (64, 512):
        await shares(socket, max_tokens)
    await crowd(socket, requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--model", default="demo")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys, socket = Path(folder) / "keys.toml", f"{folder}/socket"
        write_keys(keys)
        server = LiveServer(
            *(options.model, "--uds", socket, "--api-key-file", str(keys)),
            *("--max-num-seqs", str(SLOTS), "--disable-uvicorn-access-log"),
        )
        try:
            transport = httpx.HTTPTransport(uds=socket)
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                wait_until(lambda: listens(socket), 60, server.output)
                wait_until(lambda: client.get("/ready").status_code == 200, 60, server.output)
            asyncio.run(measure(socket, options.requests))
        finally:
            server.close()


if __name__ == "__main__":
    main()
