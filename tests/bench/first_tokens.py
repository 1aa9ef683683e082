"""First tokens under load: two checkouts, and the newer one without a bound of steps, in turns.

    python tests/bench/first_tokens.py OLDER NEWER --model FOLDER [--clients '[8, 32]'] [--rounds 3]

Each client asks again when it has its answer, without guesses: prompts of 32 to 512 tokens, answers of 16 or
64. A table in Markdown tells, for each number of clients, the tokens per second and the median first token
beside those without a bound (the medians of the ratios of rounds), the 99th percentile of gaps, and the part
of the forecasts of first tokens (`X-Facet-Expected-First-Token-Ms`) that were right within a fifth.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
from commits import Checkout

_ROUNDS_OF_CLIENT = 3
"""Requests of each client in a round."""


@dataclass
class Round:
    """What the clients of a round saw; all times are in seconds."""

    tokens: int = 0
    seconds: float = 0.0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    forecasts: list[float] = field(default_factory=list)
    """The ratio of each forecast to the first token that came."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def first(self) -> float:
        return statistics.median(self.firsts)


async def _ask(client: httpx.AsyncClient, port: int, drawn: random.Random, seen: Round) -> None:
    tokens = drawn.choice((16, 64))
    body = {
        "model": "m",
        "prompt": [drawn.randrange(100, 1000) for _ in range(drawn.choice((32, 256, 256, 512)))],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
        "speculative_tokens": 0,
    }
    began = time.perf_counter()
    times: list[float] = []
    async with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
        expected = response.headers.get("x-facet-expected-first-token-ms")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter() - began)
    seen.tokens += tokens
    seen.firsts.append(times[0])
    seen.gaps += [later - earlier for earlier, later in pairwise(times)]
    if expected is not None:
        seen.forecasts.append(float(expected) / 1000 / times[0])


async def _load(port: int, clients: int, seed: int) -> Round:
    seen, drawn = Round(), random.Random(seed)

    async def follow(client: httpx.AsyncClient) -> None:
        for _ in range(_ROUNDS_OF_CLIENT):
            await _ask(client, port, drawn, seen)

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=clients)) as client:
        began = time.perf_counter()
        await asyncio.gather(*(follow(client) for _ in range(clients)))
        seen.seconds = time.perf_counter() - began
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("older", type=Path)
    parser.add_argument("newer", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=json.loads, default=[8, 32], help="numbers as JSON: [8, 32]")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    sides = {
        "older": Checkout(given.older, given.model),
        "newer": Checkout(given.newer, given.model),
        "newer without a bound": Checkout(given.newer, given.model, "--max-token-gap-ms", "0"),
    }
    print("| clients | side | tokens/s | of unbounded | first token | gap p99, ms | forecasts |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for clients in given.clients:
        rounds = [
            {name: asyncio.run(_load(side.port, clients, seed)) for name, side in sides.items()}
            for seed in range(given.rounds)
        ]
        for name in sides:
            own = [each[name] for each in rounds]
            free = [each["newer without a bound"] for each in rounds]
            pairs = list(zip(own, free, strict=True))
            gaps = sorted(gap for each in own for gap in each.gaps)
            forecasts = [ratio for each in own for ratio in each.forecasts]
            print(
                f"| {clients} | {name} | {statistics.median(each.rate for each in own):.0f}"
                f" | {statistics.median(mine.rate / other.rate for mine, other in pairs):.3f}"
                f" | {statistics.median(mine.first / other.first for mine, other in pairs):.2f}"
                f" | {1000 * gaps[int(0.99 * len(gaps))]:.0f}"
                f" | {sum(abs(ratio - 1) <= 0.2 for ratio in forecasts) / max(1, len(forecasts)):.2f} |",
                flush=True,
            )
    for side in sides.values():
        side.close()


if __name__ == "__main__":
    main()
