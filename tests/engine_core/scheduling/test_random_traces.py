"""Random requests of random schedulers: no block leaks, and each answer equals the reference."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from fake_media import picture, seen_tokens
from fake_worker import EOS, facts, reference, vectors_of
from scheduler_bench import Bench, add, config, pool

from engine_core.prompt_media import Media
from engine_core.protocol import Add, Failed, Pooled, Tokens
from worker.protocol import Pooling, Sampling, WorkerFacts, blocks_held

WINDOWS = ((0, 5), (0, 9, 9), (7,), (4, 20), (0, 0, 3), (0, 2, 6, 17))
"""Groups of layers, of which some read the last positions only."""

LONGEST_ITEM = 5
"""The tokens of the largest picture, of which one is a text between embeddings."""


def random_facts(
    rnd: random.Random, windows: tuple[int, ...], tasks: tuple[str, ...], *, chunked: bool, media: bool
) -> WorkerFacts:
    block_size = rnd.choice([1, 2, 4, 8])
    spare, slots = rnd.choice([0, 2, 20]), rnd.choice([1, 2, 4, 8])
    step = rnd.choice([3, 8, 64]) if chunked else 64
    most = rnd.choice([LONGEST_ITEM, LONGEST_ITEM + 2, 3 * LONGEST_ITEM]) if chunked else 64
    return facts(
        block_size=block_size,
        num_blocks=blocks_held(45, step, block_size, windows) + spare,
        max_num_seqs=slots,
        max_num_batched_tokens=step,
        max_model_len=48,
        tasks=tasks,
        remembered_states=rnd.choice([None, None, 0, 1, 2, 5, 40]),
        windows=windows,
        most_embeddings=most * media,
        whole_media=media and step >= LONGEST_ITEM and rnd.random() < 0.4,
    )


def random_media(rnd: random.Random, tokens: list[int]) -> tuple[Media, ...]:
    """Some of few pictures among these tokens. The same one always takes as many."""
    media: list[Media] = []
    at = rnd.choice([0, 0, 1, 5])
    while len(media) < 3:
        name = rnd.randrange(6)
        length = 1 + name % 3 * 2
        if at + length > len(tokens):
            break
        runs = ((0, 2), (3, 2)) if length == LONGEST_ITEM else None
        media.append(picture(b"%d" % name, at, length, runs))
        at += length + rnd.choice([0, 0, 1, 4])
    return tuple(media)


def random_bench(
    rnd: random.Random, windows: tuple[int, ...], *, media: bool = False
) -> tuple[Bench, list[tuple[int, Add]]]:
    """A configuration, and requests that share prefixes, salts, pictures and a tiny alphabet."""
    chunked = rnd.random() < 0.8
    tasks = ["embed", "token_embed"] if windows == (0,) else ["embed"]
    limits = random_facts(rnd, windows, ("generate", *tasks), chunked=chunked, media=media)
    chosen = config(
        enable_prefix_caching=rnd.random() < 0.8,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rnd.choice([0, 0, 2, 5]),
        scheduling_policy=rnd.choice(["fcfs", "priority"]),
        pipeline_parallel_size=rnd.choice([1, 1, 1, 2, 3, 4]),
        steps_ahead=rnd.choice([0, 1, 1, 2]),
        max_num_encoder_input_tokens=rnd.choice([None, 1, 6]) if media else None,
        disable_chunked_mm_input=media and limits.max_num_batched_tokens > 5 and rnd.random() < 0.2,
    )
    top = rnd.choice([2, 49])  # a tiny alphabet makes equal blocks after different prefixes common
    shared = [rnd.randint(1, top) for _ in range(16)]
    owners = rnd.choice([[""], ["a", "b"], ["a", "a", "a", "b"], ["", "a", "b", "c"]])
    requests = []
    for id in range(14):
        own = [rnd.randint(1, top) for _ in range(rnd.randint(1, 14))]
        max_tokens = rnd.choice([rnd.randint(1, 12), 100])
        tokens = shared[: rnd.randint(0, 16)] + own
        priority, salt = rnd.randint(0, 2), rnd.choice(["", "", "a"])
        items = random_media(rnd, tokens) if media and rnd.random() < 0.8 else ()
        owned = {"media": items, "owner": rnd.choice(owners), "weight": rnd.choice([1.0, 1.0, 0.3, 4.0])}
        if rnd.random() < 0.3:
            task = rnd.choice(tasks)
            text = pool(id, tokens, task, priority=priority, salt=salt, **owned)
            requests.append((rnd.randint(0, 1), text))
            continue
        if len(tokens) + max_tokens > 45:
            max_tokens = 45 - len(tokens)
        request = add(
            id,
            tokens,
            max_tokens,
            priority=priority,
            salt=salt,
            min_tokens=min(max_tokens, rnd.choice([0, 0, 5])),
            stop_token_ids=rnd.choice([(), (EOS,), tuple(range(5))]),
            prompt_logprobs=rnd.choice([None, None, 0]),
            **owned,
        )
        requests.append((rnd.randint(0, 1), request))
    return Bench(chosen, limits, depth=chosen.depth - 1), requests


@pytest.mark.turns
@pytest.mark.parametrize("part", range(9))
def test_random_traces_equal_the_reference(part: int) -> None:
    seen = Counter()
    for seed in range(part * 250, (part + 1) * 250):
        rnd = random.Random(seed)
        windows = WINDOWS[seed % len(WINDOWS)] if part in (5, 6) else (0,)
        bench, requests = random_bench(rnd, windows, media=part > 6)
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
        assert not paused
        assert not bench.scheduler.owners.active and not bench.scheduler.waiting.count
        assert bench.scheduler.cache.pool.free == bench.facts.num_blocks
        for client, request in requests:
            params = request.params
            if isinstance(params, Pooling):
                check_pooled(bench, client, request, params, (client, request.id) in aborted)
                seen["pooled"] += 1
                continue
            check_text(bench, client, request, params, (client, request.id) in aborted)
        seen["preemptions"] += bench.scheduler.counters.preemptions
        seen["hits"] += bench.scheduler.counters.prefix_hits
        if bench.facts.remembered_states:
            seen["hits of hybrids"] += bench.scheduler.counters.prefix_hits
            check_states(bench)
        seen["aborted"] += len(aborted)
        if part > 6:
            seen["encoded"] += bench.scheduler.media.encoded
            seen["reused"] += bench.scheduler.media.reused
    names = ("preemptions", "hits", "hits of hybrids", "aborted", "pooled", "pauses")
    counts = [seen[each] for each in (*names, *(("encoded", "reused") if part > 6 else ()))]
    assert min(counts) > 20, "the traces do not exercise enough"


def check_text(bench: Bench, client: int, request: Add, params: Sampling, aborted: bool) -> None:
    tokens = seen_tokens(request)
    expected = reference(tokens, params.max_tokens, params.stop_token_ids, params.min_tokens)
    text, last = bench.text(request.id, client), bench.last(request.id, client)
    if aborted:
        expected = expected[: len(text)]
        assert last.finish == "abort"
    assert text == expected, f"request {request.id}"
    if text:
        check_first(bench.outputs[client, request.id][0], request)


def check_states(bench: Bench) -> None:
    """When all has ended, every place is free or found by one hash."""
    states = bench.scheduler.cache.states
    if states is not None:
        assert len(states) + states.free == bench.facts.remembered_states


def check_pooled(bench: Bench, client: int, request: Add, params: Pooling, aborted: bool) -> None:
    (only,) = bench.outputs[client, request.id]
    if aborted:
        assert isinstance(only, Failed) and only.code == 503
    else:
        assert isinstance(only, Pooled) and only.vectors == vectors_of(seen_tokens(request), params)


def check_first(first: Tokens | Pooled | Failed, request: Add) -> None:
    assert isinstance(first, Tokens) and isinstance(request.params, Sampling)
    if request.params.prompt_logprobs is None:
        assert first.prompt_logprobs is None
    else:
        assert first.cached == 0
        assert [entry.ids for entry in first.prompt_logprobs or []] == [[t] for t in request.tokens[1:]]


@pytest.mark.turns
@pytest.mark.parametrize("part", range(2))
def test_random_traces_of_whole_sequences(part: int) -> None:
    """An encoder has no cache and no chunks: each text is computed in one step, beside any others."""
    for seed in range(part * 200, (part + 1) * 200):
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
