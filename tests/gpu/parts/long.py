"""Two thousand requests of mixed lengths: all are answered, and nothing is left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from dummy import opened
from results import Result
from scheduled import Loop
from workbench import Part, Workbench

from engine_core.protocol import AddRequest
from worker.protocol import Sampling

_REQUESTS, _LIVE = 2000, 300
"""How many requests, and how many of them at a time."""
_PREFIXES, _SEEDED = 8, 12
_FLAT = 16 << 20
"""Bytes by which tensors may grow in the second half."""


def _requests(bench: Workbench, first: int, count: int) -> list[AddRequest]:
    """Requests of mixed lengths, half of which begin alike, greedy or with seeds and filters."""
    chance = random.Random(first)
    shared = [[chance.randrange(3, 2000) for _ in range(bench.tokens(512))] for _ in range(_PREFIXES)]
    requests: list[AddRequest] = []
    for number in range(first, first + count):
        length = 1 + int(bench.tokens(1500) * chance.random() ** 3)
        tokens = [chance.randrange(3, 2000) for _ in range(length)]
        if chance.random() < 0.5:
            tokens = chance.choice(shared) + tokens
        params = Sampling(
            max_tokens=1 + int(bench.tokens(160) * chance.random() ** 2),
            temperature=chance.choice((0.0, 0.7, 1.2)),
            top_p=chance.choice((1.0, 0.9)),
            top_k=chance.choice((0, 0, 40)),
            seed=number,
        )
        requests.append(AddRequest(id=number, tokens=tokens, params=params))
    return requests


def run_long(bench: Workbench) -> Iterator[Result]:
    """Requests come and go, some are aborted; before and after, the same ones with the same seeds."""
    rows, longest = bench.size(256, 6), bench.tokens(1500) + bench.tokens(512) + bench.tokens(160) + 2
    # Less than all that run would take, so that some are preempted.
    sizes = {} if bench.on_card else {"block_size": 4}
    blocks = bench.size(rows * 450 // 64, 25)
    with opened(bench, bench.shape("0.6B"), rows=rows, longest=longest, blocks=blocks, **sizes) as dummy:
        dummy.make_graphs(whole_only=False)
        loop = Loop(dummy.runner.launch, dummy.facts, dummy.shape.vocabulary)
        seeded = _requests(bench, 1_000_000, _SEEDED)
        told = loop.run(seeded)
        loop.scheduler.cache.pool.withdraw_all()
        compiled = loop.compilations
        total = bench.size(_REQUESTS, 40)
        began = time.perf_counter()
        first_half = _drive(loop, _requests(bench, 0, total // 2), bench.size(_LIVE, 12))
        memory = bench.memory()
        second_half = _drive(loop, _requests(bench, total // 2, total - total // 2), bench.size(_LIVE, 12))
        took = time.perf_counter() - began
        held, in_use = (after - before for after, before in zip(bench.memory(), memory, strict=True))
        yield from _account(loop, total, first_half + second_half, took)
        fresh = loop.compilations - compiled
        yield Result("kernels compiled meanwhile", str(fresh), wrong=int(fresh > 0))
        text = f"tensors {held / (1 << 20):+.0f} MiB, with what torch keeps {in_use / (1 << 20):+.0f} MiB"
        yield Result("memory in the second half", text, wrong=int(held > _FLAT))
        loop.scheduler.cache.pool.withdraw_all()
        repeated = loop.run(seeded)
        differ = sum(one != other for one, other in zip(told, repeated, strict=True))
        text = f"{differ} of {_SEEDED} differ" if differ else "the same tokens"
        yield Result("seeds repeat, before and after", text, wrong=int(differ > 0))


def _drive(loop: Loop, requests: list[AddRequest], live: int) -> int:
    """Keep so many requests under way until all are answered; returns how many were aborted."""
    chance, aborted = random.Random(1), 0
    waiting = requests[::-1]
    while waiting or loop.busy:
        while waiting and len(loop.scheduler.live) < live:
            loop.add(waiting.pop())
        if chance.random() < 0.15 and loop.scheduler.live:
            _, id = chance.choice(list(loop.scheduler.live))
            loop.abort(id)
            aborted += 1
        loop.step()
    return aborted


def _account(loop: Loop, total: int, aborted: int, took: float) -> Iterator[Result]:
    """What became of all requests."""
    answers = {id: answer for id, answer in loop.answers.items() if id < total}
    unanswered = sum(answer.ends != 1 for answer in answers.values())
    failed = [answer.finish for answer in answers.values() if answer.finish.startswith("failed")]
    text = (
        failed[0] if failed else "each got one answer" if not unanswered else f"{unanswered} did not get one"
    )
    wrong = unanswered + len(failed) + abs(total - len(answers))
    yield Result(f"{_REQUESTS} requests, {aborted} aborted", text, wrong=wrong)
    tokens = sum(len(answer.tokens) for answer in answers.values())
    yield Result("tokens generated", "", tokens / took, "tok/s")
    counters, pool = loop.scheduler.counters, loop.scheduler.cache.pool
    yield Result("preempted", f"{counters.preemptions} times" if counters.preemptions else "never: no proof")
    hits = f"{counters.prefix_hits} of {counters.prefix_queries} tokens of prompts"
    yield Result("found in the prefix cache", hits)
    held = pool.count - pool.free
    yield Result("blocks given back", f"{held} are not" if held else "all", wrong=held)


PARTS = (Part("requests", run_long, 55),)
