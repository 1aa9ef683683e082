"""What a batch costs those who wait for their answers: streams under Poisson load alone, and beside a batch.

    python tests/bench/batches.py [--lines 20000] [--share 0.3] [--seconds 20] [-- options of serve]
    python tests/bench/batches.py --kills 3 [--lines 20000] [--rate 20]

Serves the demo model, or the one that is named. It measures how many answers a second a batch alone gets,
then streams that come at random at the given share of that rate, then both together, and says how the 99th
percentiles of first tokens and of gaps, and the answers of both, compare. With `--kills` it kills
the API process so often while a batch is computed beside streams at the given rate, and counts how often each
line was answered.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from live import LiveServer, wait_until  # noqa: E402

WORDS = ("the", "city", "of", "Paris", "lies", "on", "a", "river", "and", "bread", "was", "sold", "there")
PROMPT_WORDS, TOKENS = 60, 64


@dataclass
class Streams:
    """What clients saw of their streams."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    broken: int = 0


def body(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    prompt = " ".join(chance.choices(WORDS, k=PROMPT_WORDS))
    return {"prompt": f"{seed} {prompt}", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


async def stream(client: httpx.AsyncClient, seed: int, seen: Streams) -> None:
    """Reads a stream through a bare socket: a client's parsing would take much of the cores."""
    content = json.dumps({**body(seed), "stream": True}).encode()
    url = client.base_url
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nConnection: close\r\n"
    more = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    whole = b""
    try:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"{head}{more}".encode() + content)
        began = last = time.perf_counter()
        while piece := await reader.read(1 << 16):
            whole += piece
            if b"data: {" in piece:
                now = time.perf_counter()
                (seen.gaps if last > began else seen.first).append(now - last)
                last = now
        writer.close()
    except OSError:  # the API process was killed
        pass
    seen.broken += b'"finish_reason":"length"' not in whole or b"data: [DONE]" not in whole


async def poisson(client: httpx.AsyncClient, rate: float, seconds: float) -> Streams:
    """Sends streams at this rate for so long."""
    seen, chance, tasks = Streams(), random.Random(1), list[asyncio.Task[None]]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        await asyncio.sleep(chance.expovariate(rate))
        tasks.append(asyncio.create_task(stream(client, 1_000_000 + len(tasks), seen)))
    await asyncio.gather(*tasks)
    return seen


async def begin_batch(client: httpx.AsyncClient, lines: int, first: int) -> str:
    rows = (
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body(n)}
        for n in range(first, first + lines)
    )
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = (
        await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)})
    ).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return (await client.post("/v1/batches", json=asked)).json()["id"]


async def done(client: httpx.AsyncClient, id: str) -> tuple[int, str]:
    found = (await client.get(f"/v1/batches/{id}")).json()
    return found["request_counts"]["completed"], found["status"]


async def rate_of(client: httpx.AsyncClient, id: str, seconds: float) -> float:
    """The lines a second that a batch gets from now on."""
    before, began = (await done(client, id))[0], time.perf_counter()
    await asyncio.sleep(seconds)
    after, status = await done(client, id)
    if status != "in_progress":
        raise SystemExit(f"the batch is {status} too early: give more --lines")
    return (after - before) / (time.perf_counter() - began)


def high(values: list[float], share: float = 0.99) -> float:
    return 1000 * sorted(values)[int(share * (len(values) - 1))]


async def measure(url: str, given: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=512)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await poisson(client, 20, 1)  # what is learned of the steps
        id = await begin_batch(client, given.lines, 0)
        await asyncio.sleep(3)
        full = await rate_of(client, id, given.seconds / 2)
        await client.post(f"/v1/batches/{id}/cancel")
        while (await done(client, id))[1] != "cancelled":
            await asyncio.sleep(0.1)
        rate = given.share * full
        alone = await poisson(client, rate, given.seconds)
        id = await begin_batch(client, given.lines, given.lines)
        await asyncio.sleep(3)
        lines, both = await asyncio.gather(
            rate_of(client, id, given.seconds), poisson(client, rate, given.seconds)
        )
    if alone.broken or both.broken:
        raise SystemExit(f"{alone.broken} and {both.broken} streams broke")
    together = lines + len(both.first) / given.seconds
    load = os.getloadavg()[0]
    print(f"load average {load:.1f}; a batch alone: {full:.1f} answers/s; streams come at {rate:.1f}/s")
    print(f"{'':>10} {'first token p50':>16} {'p99':>8} {'gap p50':>9} {'p99':>8}   ms")
    for name, seen in (("alone", alone), ("beside", both)):
        print(
            f"{name:>10} {high(seen.first, 0.5):16.1f} {high(seen.first):8.1f} "
            f"{high(seen.gaps, 0.5):9.1f} {high(seen.gaps):8.1f}"
        )
    print(f"answers/s of both: {together:.1f}, {together / full:.2f} of those of a batch alone")


async def outlive(server: LiveServer, given: argparse.Namespace) -> None:
    """Kills the API process while it works on a batch, and says how often each line was answered."""
    broken = 0
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        began = time.perf_counter()
        id = await begin_batch(client, given.lines, 0)
        for number in range(1, given.kills + 1):
            due = given.lines * number // (given.kills + 1)
            while (await done(client, id))[0] < due:
                broken += (await poisson(client, given.rate, 1)).broken
            beside = asyncio.create_task(poisson(client, given.rate, 1))
            await asyncio.sleep(0.5)
            [killed] = server.api_pids()
            os.kill(killed, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda gone=killed: server.api_pids() not in ([], [gone]), 60)
            await asyncio.to_thread(server.wait_ready)
            broken += (await beside).broken
        while (await done(client, id))[1] != "completed":
            broken += (await poisson(client, given.rate, 1)).broken
        took = time.perf_counter() - began
        found = (await client.get(f"/v1/batches/{id}")).json()
        content = (await client.get(f"/v1/files/{found['output_file_id']}/content")).text
    answered = Counter(json.loads(line)["custom_id"] for line in content.splitlines())
    once = sum(count == 1 for count in answered.values())
    often, never = len(answered) - once, given.lines - len(answered)
    print(
        f"{given.lines} lines, {given.kills} kills, {took:.0f} s: {once} answered once, {often} more often,"
    )
    print(f"{never} never; {broken} streams broke")
    if once != given.lines or found["request_counts"]["failed"]:
        raise SystemExit("each line must be answered once")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("serve", nargs="*", default=["demo", "--kv-cache-memory-bytes", "512M"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = LiveServer(
            *given.serve, "--batch-dir", folder, "--disable-uvicorn-access-log", watched=False
        )
        try:
            ready = server.wait_ready()
            asyncio.run(outlive(ready, given) if given.kills else measure(ready.url, given))
        finally:
            server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
