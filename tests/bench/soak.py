"""Hours of mixed requests to a real server, whose answers must be right, and whose memory must not grow.

    python tests/bench/soak.py [--minutes 30] [--clients 24] [--faults]

Serves the demo model. Each client sends one request after another: completions, streams, vectors, wrong
bodies, and streams that it leaves. An answer that is not that of the first time is wrong. With --faults an
engine or an API process is killed or stopped every half a minute: then a request may also be told that it
cannot be answered. The end names what held up event loops and steps. Ends with 1 if an answer was wrong, or a
status above 499 came without a fault.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from holdups import explanation, holdups  # noqa: E402
from live import LiveServer, serving  # noqa: E402

MIB = 1 << 20
SAMPLE_SECONDS = 10.0
WARM_SHARE = 0.3
"""The share of the time after which memory counts as that of a server that has seen everything."""
WORDS = ("the", "city", "of", "Paris", "lies", "on", "a", "river", "and", "bread", "was", "sold", "there")
WRONG: list[tuple[str, bytes]] = [
    ("/v1/completions", b"{"),
    ("/v1/completions", b'{"prompt": 7}'),
    ("/v1/completions", b'{"prompt": "x", "temperature": -1}'),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": 100000000}'),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/embeddings", b'{"input": []}'),
    ("/v1/nothing", b"{}"),
]


class Soak:
    def __init__(self, server: LiveServer, seconds: float, *, faults: bool) -> None:
        self.server = server
        self.seconds = seconds
        self.faults = faults
        self.seen = Counter[str]()
        self.wrong: list[str] = []
        self.memory: dict[str, list[tuple[float, float]]] = {}
        """Role -> the time and the MiB of each sample."""
        self._first: dict[str, object] = {}
        self._began = time.monotonic()

    @property
    def over(self) -> bool:
        return time.monotonic() - self._began > self.seconds

    async def run(self, clients: int) -> None:
        tasks = [asyncio.create_task(self._send_on_and_on(seed)) for seed in range(clients)]
        tasks.append(asyncio.create_task(self._sample_memory()))
        if self.faults:
            tasks.append(asyncio.create_task(self._do_harm()))
        await asyncio.gather(*tasks)

    # Requests.

    async def _send_on_and_on(self, seed: int) -> None:
        rnd = random.Random(seed)
        kinds: list[Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]] = [
            self._complete,
            self._stream,
            self._embed,
            self._send_wrong,
            self._leave,
        ]
        while not self.over:
            # The server closes connections that are idle for 5 s: a busy client must not meet that moment.
            limits = httpx.Limits(keepalive_expiry=2.0)
            async with httpx.AsyncClient(base_url=self.server.url, timeout=120, limits=limits) as http:
                for _ in range(rnd.randint(1, 50)):
                    kind = rnd.choice(kinds)
                    try:
                        outcome = await kind(http, rnd)
                    except httpx.TransportError as error:
                        outcome = f"told: {type(error).__name__}"
                    self.seen[f"{kind.__name__.strip('_')}: {outcome}"] += 1
                    if self.over:
                        return

    async def _complete(self, http: httpx.AsyncClient, rnd: random.Random) -> str:
        body = a_request(rnd)
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return f"told: {answer.status_code}"
        return self._compare(json.dumps(body), answer.json()["choices"][0]["text"])

    async def _stream(self, http: httpx.AsyncClient, rnd: random.Random) -> str:
        body = a_request(rnd)
        text = ""
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                return f"told: {answer.status_code}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return self._compare(json.dumps(body), text)
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return f"told in the stream: {event['error']['code']}"
                    text += event["choices"][0]["text"] if event["choices"] else ""
        return self._note_wrong("a stream ended without [DONE] and without an error")

    async def _embed(self, http: httpx.AsyncClient, rnd: random.Random) -> str:
        body = {"input": [a_text(rnd) for _ in range(rnd.choice([1, 1, 8]))]}
        answer = await http.post("/v1/embeddings", json=body)
        if answer.status_code != 200:
            return f"told: {answer.status_code}"
        vectors = [entry["embedding"] for entry in answer.json()["data"]]
        pairs = zip(body["input"], vectors, strict=True)
        outcomes = {self._compare(f"vector of {text}", vector) for text, vector in pairs}
        return "wrong" if "wrong" in outcomes else "right"

    async def _send_wrong(self, http: httpx.AsyncClient, rnd: random.Random) -> str:
        path, body = rnd.choice(WRONG)
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
        if 400 <= answer.status_code < 500:
            return "right"
        if answer.status_code == 503:
            return "told: 503"
        return self._note_wrong(f"{path} {body!r} was answered {answer.status_code}")

    async def _leave(self, http: httpx.AsyncClient, rnd: random.Random) -> str:
        body = {**a_request(rnd), "stream": True, "max_tokens": 200, "ignore_eos": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            for _ in range(rnd.randint(0, 10)):
                await anext(lines, None)
        return "left"

    def _compare(self, asked: str, answer: object) -> str:
        """Compare an answer with the first one to the same request."""
        if self._first.setdefault(asked, answer) == answer:
            return "right"
        return self._note_wrong(f"{asked}: {answer!r:.200} and at first {self._first[asked]!r:.200}")

    def _note_wrong(self, what: str) -> str:
        self.wrong.append(what)
        return "wrong"

    # The server.

    async def _sample_memory(self) -> None:
        while not self.over:
            for role, pid in self._roles().items():
                if (mib := resident(pid)) is not None:
                    at = time.monotonic() - self._began
                    self.memory.setdefault(role, []).append((at, mib))
            left = self.seconds - (time.monotonic() - self._began)
            show(
                f"{left / 60:6.1f} minutes left, {sum(self.seen.values())} requests, {len(self.wrong)} wrong"
            )
            await asyncio.sleep(SAMPLE_SECONDS)

    def _roles(self) -> dict[str, int]:
        roles = {"supervisor": self.server.process.pid}
        roles |= {f"engine {at}": pid for at, pid in enumerate(self.server.engine_pids())}
        return roles | {f"API process {at}": pid for at, pid in enumerate(self.server.api_pids())}

    async def _do_harm(self) -> None:
        rnd = random.Random(0)
        while not self.over:
            await asyncio.sleep(min(30.0, self.seconds / 10))
            number = rnd.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            pids = rnd.choice([self.server.engine_pids(), self.server.api_pids()])
            if pids:
                self.seen[f"harm: {number.name}"] += 1
                os.kill(rnd.choice(pids), number)

    # What came out.

    def report(self) -> bool:
        """Print what became of everything; returns whether it was as it must be."""
        print()
        for what, count in sorted(self.seen.items()):
            print(f"{count:9,}  {what}")
        print("\nMiB after the warm-up and at the end, and the most:")
        for role, samples in self.memory.items():
            warm = [mib for at, mib in samples if at >= self.seconds * WARM_SHARE]
            if warm:
                print(f"  {role:16} {warm[0]:8.1f} {warm[-1]:8.1f} {max(warm):8.1f}")
        print("\nWhat held up an event loop or a step of an engine, and why it may:")
        for what, times in holdups(self.server.output()).items():
            print(f"{len(times):9,}  {max(times):.2f} s, {what}: {explanation(what) or 'UNEXPLAINED'}")
        for what in self.wrong[:20]:
            print("WRONG:", what)
        told = [what for what in self.seen if "told" in what and not self.faults]
        return not self.wrong and not told


def a_text(rnd: random.Random) -> str:
    """One of a few hundred texts, so that most are asked for again and again."""
    own = random.Random(rnd.randrange(300))
    return " ".join(own.choices(WORDS, k=own.choice([1, 5, 30, 90])))


def a_request(rnd: random.Random) -> dict[str, object]:
    text = a_text(rnd)
    own = random.Random(text)
    return {
        "prompt": text,
        "max_tokens": own.choice([1, 8, 40]),
        "seed": 1,
        "temperature": own.choice([0, 1]),
    }


def resident(pid: int) -> float | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
    except (FileNotFoundError, ProcessLookupError):
        return None


def show(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{line}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--faults", action="store_true")
    args = parser.parse_args()
    options = (
        "--kv-cache-memory-bytes",
        "64M",
        "--disable-uvicorn-access-log",
        "--uvicorn-log-level",
        "error",
    )
    with serving("demo", *options) as server:
        soak = Soak(server, args.minutes * 60, faults=args.faults)
        asyncio.run(soak.run(args.clients))
        return 0 if soak.report() else 1


if __name__ == "__main__":
    sys.exit(main())
