"""Random requests of random schedulers: no block leaks, and each answer equals the reference.

In half of the parts tokens are guessed, and guesses that hold or do not change nothing of an answer.
"""

import random
from collections import Counter, deque

import pytest
from fake_media import seen_tokens
from fake_worker import facts, reference, vectors_of
from random_bench import WINDOWS, random_bench
from scheduler_bench import Bench, config, pool
from scripted_speculator import ScriptedGuesser, use

from engine_core.features.states.prefix_states import PrefixStates
from engine_core.protocol import AddRequest, Failed, Pooled, Tokens
from worker.protocol import Pooling, Sampling


@pytest.mark.parametrize("part", range(18))
def test_random_traces_equal_the_reference(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, kind, guesses = Counter(), part // 2, part % 2 > 0
    for seed in range(part * 71, part * 71 + 60):
        rnd = random.Random(seed)
        windows = WINDOWS[seed % len(WINDOWS)] if kind in (5, 6) else (0,)
        guesser = ScriptedGuesser(rnd, rnd.choice([1, 3, 8]), rnd.choice([0.0, 0.5, 0.9, 1.0]))
        if guesses:
            use(monkeypatch, guesser)
        bench, requests = random_bench(rnd, windows, media=kind > 6, guesses=guesses)
        aborted = run(bench, rnd, requests, seen, seed)
        paused = bench.scheduler.paused
        assert not paused and not guesser.known
        assert not bench.scheduler.owners.active and not bench.scheduler.waiting.count
        assert bench.scheduler.cache.pool.free == bench.facts.num_blocks
        check_answers(bench, requests, aborted, guesses)
        seen["pooled"] += sum(isinstance(request.params, Pooling) for _, request in requests)
        seen["preemptions"] += bench.scheduler.counters.preemptions
        seen["hits"] += bench.scheduler.counters.prefix_hits
        if bench.facts.remembered_states:
            seen["hits of hybrids"] += bench.scheduler.counters.prefix_hits
            check_states(bench)
        seen["aborted"] += len(aborted)
        seen["held"] += sum(guesser.held)
        seen["failed"] += guesser.guessed - sum(guesser.held)
        seen["in stages"] += guesser.drafts * (bench.config.pipeline_parallel_size > 1)
        if kind > 6:
            seen["encoded"] += bench.media.encoded
            seen["reused"] += bench.media.reused
    names = ("preemptions", "hits", "hits of hybrids", "aborted", "pooled", "pauses")
    names += ("encoded", "reused") if kind > 6 else ()
    names += ("held", "failed", "in stages") if guesses else ()
    counts = [seen[each] for each in names]
    assert min(counts) > 10, "the traces do not exercise enough"


def run(
    bench: Bench, rnd: random.Random, requests: list[tuple[int, AddRequest]], seen: Counter, seed: int
) -> set[tuple[int, int]]:
    """Add the requests bit by bit, and abort or pause some; those that were aborted."""
    todo, aborted = deque(requests), set()
    aborts, pauses = rnd.random() < 0.5, rnd.random() < 0.5
    paused = bench.scheduler.paused
    while todo or bench.scheduler.live or bench.in_flight:
        if todo and rnd.random() < 0.7:
            client, request = todo.popleft()
            bench.add(request, client)
        if aborts and bench.scheduler.live and rnd.random() < 0.1:
            key = rnd.choice(sorted(bench.scheduler.live))
            aborted.add(key)
            bench.abort(key)
        if pauses and bench.scheduler.live and rnd.random() < 0.2:
            key = rnd.choice(sorted(bench.scheduler.live))
            (paused.resume if bench.scheduler.live[key] in paused else paused.pause)([key])
            seen["pauses"] += 1
        if not bench.step() and not todo and bench.scheduler.live:
            assert paused, f"stuck with seed {seed}"
            paused.resume([rnd.choice(sorted(seq.key for seq in paused))])
        assert bench.now < 5000, f"no end with seed {seed}"
    return aborted


def check_answers(
    bench: Bench, requests: list[tuple[int, AddRequest]], aborted: set[tuple[int, int]], guesses: bool
) -> None:
    for client, request in requests:
        params = request.params
        if isinstance(params, Pooling):
            check_pooled(bench, client, request, params, (client, request.id) in aborted)
            continue
        check_text(bench, client, request, params, (client, request.id) in aborted)
        told = bench.last(request.id, client).guesses
        assert (told is not None) == (guesses and request.reports_guesses)


def check_text(bench: Bench, client: int, request: AddRequest, params: Sampling, aborted: bool) -> None:
    tokens = seen_tokens(request)
    done = len(tokens) - (request.prompt_len or len(tokens))
    least = max(0, params.min_tokens - done)
    expected = reference(tokens, params.max_tokens - done, params.stop_token_ids, least)
    text, last = bench.text(request.id, client), bench.last(request.id, client)
    if aborted:
        expected = expected[: len(text)]
        assert last.finish == "abort"
    assert text == expected, f"request {request.id}"
    if text and not done:
        check_first(bench.outputs[client, request.id][0], request)


def check_states(bench: Bench) -> None:
    """When all has ended, every place is free or found by one hash."""
    if (feature := bench.scheduler.hooks.find(PrefixStates)) is not None:
        assert len(feature.pool) + feature.pool.free == bench.facts.remembered_states


def check_pooled(bench: Bench, client: int, request: AddRequest, params: Pooling, aborted: bool) -> None:
    (only,) = bench.outputs[client, request.id]
    if aborted:
        assert isinstance(only, Failed) and only.code == 503
    else:
        assert isinstance(only, Pooled) and only.vectors == vectors_of(seen_tokens(request), params)


def check_first(first: Tokens | Pooled | Failed, request: AddRequest) -> None:
    assert isinstance(first, Tokens) and isinstance(request.params, Sampling)
    if request.params.prompt_logprobs is None:
        assert first.prompt_logprobs is None
    else:
        assert first.cached == 0
        assert [entry.ids for entry in first.prompt_logprobs or []] == [[t] for t in request.tokens[1:]]


@pytest.mark.parametrize("part", range(2))
def test_random_traces_of_whole_sequences(part: int) -> None:
    """An encoder has no cache and no chunks: each text is computed in one step, beside any others."""
    for seed in range(part * 80, (part + 1) * 80):
        rnd = random.Random(seed)
        chosen = config(
            scheduling_policy=rnd.choice(["fcfs", "priority"]),
            long_prefill_token_threshold=rnd.choice([0, 3]),
            enable_chunked_prefill=rnd.random() < 0.5,
        )
        limits = facts(
            max_num_seqs=rnd.choice([1, 3, 8]),
            max_num_batched_tokens=rnd.choice([24, 40]),
            max_model_len=24,
            tasks=("embed", "token_embed"),
            causal=False,
        )
        bench = Bench(chosen, limits, depth=rnd.choice([0, 1, 2]))
        todo = deque(
            pool(id, [rnd.randint(1, 49) for _ in range(rnd.choice([1, 5, 24]))], priority=rnd.randint(0, 2))
            for id in range(20)
        )
        requests = list(todo)
        while todo or bench.scheduler.live or bench.in_flight:
            if todo and rnd.random() < 0.8:
                bench.add(todo.popleft())
            assert bench.step() or todo or not bench.scheduler.live, f"stuck with seed {seed}"
        for request in requests:
            assert isinstance(request.params, Pooling)
            assert bench.pooled(request.id).vectors == vectors_of(request.tokens, request.params)
        assert bench.scheduler.stats(bench.now).kv_usage == 0
