"""Tokens a second of answers in a language beside free ones, of this server or a peer, through its API.

    python tests/bench/constrained.py URL [--model NAME] [--rows 1 8 32] [--tokens 128] [--rounds 3]

All answers have the same length: no answer of the schema can be complete, and free ones ignore their end.
Each round has one batch in which none is constrained, one with every second and one with all, in an order
that changes, so that all three meet the same moods of the machine. The least time of each kind counts, for
others can only make it longer. Of the batch with both kinds the rate is told of all, and of the free ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from itertools import permutations
from typing import Any

import httpx

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
KINDS = {"none": 0, "half": 2, "all": 1}
"""The name of a batch, and that every so many of its rows are constrained."""
PROMPT = 64


async def answer(client: httpx.AsyncClient, body: dict[str, Any], tokens: int) -> float:
    """Wait for one whole answer; returns when it came."""
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    written = response.json()["usage"]["completion_tokens"]
    if written != tokens:
        raise SystemExit(f"an answer has {written} tokens, and should have {tokens}")
    return time.perf_counter()


async def batch(
    client: httpx.AsyncClient, model: str, rows: int, tokens: int, every: int, seed: int
) -> tuple[float, float]:
    """The seconds until all rows were answered, and until all that are free were."""
    rng = random.Random(seed)
    asked: list[asyncio.Task[float]] = []
    begin = time.perf_counter()
    for row in range(rows):
        body: dict[str, Any] = {
            "model": model,
            "prompt": [rng.randint(100, 2000) for _ in range(PROMPT)],
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": seed * 1000 + row,
            "ignore_eos": True,
        }
        if every and row % every == 0:
            body["structured_outputs"] = {"json": SCHEMA}
        asked.append(asyncio.create_task(answer(client, body, tokens)))
    ends = await asyncio.gather(*asked)
    free = [end for row, end in enumerate(ends) if not every or row % every]
    return max(ends) - begin, max(free, default=begin) - begin


async def measure(url: str, model: str, rows: int, tokens: int, rounds: int) -> None:
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    free: list[float] = []
    orders = list(permutations(KINDS))
    async with httpx.AsyncClient(
        base_url=url, timeout=600, limits=httpx.Limits(max_connections=64)
    ) as client:
        for kind in KINDS:  # the first of each kind prepares what later ones share
            await batch(client, model, rows, min(tokens, 16), KINDS[kind], 0)
        for number in range(rounds):
            for kind in orders[number * 5 % len(orders)]:
                whole, of_free = await batch(client, model, rows, tokens, KINDS[kind], number + 1)
                found[kind].append(whole)
                if kind == "half":
                    free.append(of_free)
    none = min(found["none"])
    told = [f"none {rows * tokens / none:.1f}"]
    for kind in ("half", "all"):
        if rows > 1 or kind == "all":
            told.append(f"{kind} {rows * tokens / min(found[kind]):.1f} ({none / min(found[kind]):.3f})")
    if rows > 1:
        told.append(f"the free ones of half ({none / min(free):.3f})")
    print(f"{rows} rows, tokens a second: {', '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure answers in a language beside free ones.")
    parser.add_argument("url")
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    model = asked.model or httpx.get(f"{asked.url}/v1/models").json()["data"][0]["id"]
    for rows in asked.rows:
        asyncio.run(measure(asked.url, model, rows, asked.tokens, asked.rounds))


if __name__ == "__main__":
    main()
