"""Beam search in the scheduler: the answers of a plain search, whatever memory, steps and others do."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from fake_beams import likeliest, search, told
from fake_cache import entries_of, sum_up
from fake_media import seen_tokens
from fake_worker import EOS, facts, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from random_bench import WINDOWS, random_bench
from scheduler_bench import Bench, add, config

from engine_core.beams.beam_params import BeamParams
from engine_core.protocol import Add, Failed
from worker.protocol import Pooling, Sampling


def likely(tokens: list[int], count: int) -> list[tuple[int, float]]:
    entry = likeliest(sum_up(entries_of(tokens)), count)
    return list(zip(entry.ids[1:], entry.values[1:], strict=True))


def searched(id: int, tokens: list[int], beams: BeamParams, max_tokens: int = 6, **changes: object) -> Add:
    asked = {"temperature": 0.0, "logprobs": beams.candidates, "stop_token_ids": (EOS, 3, 4), **changes}
    return add(id, tokens, max_tokens, beams=beams, **asked)


def check(bench: Bench, request: Add, client: int = 0) -> None:
    """Assert that the only answer to a request has what a plain search finds."""
    (only,), params = bench.outputs[client, request.id], request.params
    assert (
        isinstance(params, Sampling) and request.beams is not None and not isinstance(only, Failed | Pooling)
    )
    expected = search(likely, seen_tokens(request), request.beams, params.max_tokens, params.stop_token_ids)
    found = told(only.beams)
    assert [each[0] for each in found] == [each[0] for each in expected]
    assert [each[1:] for each in found] == [(pytest.approx(total), finish) for _, total, finish in expected]
    assert only.finish == found[0][2] and not only.tokens


@settings(max_examples=150, deadline=None)
@given(
    width=st.integers(1, 5),
    answers=st.integers(1, 5),
    penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0, 0.6]),
    early=st.booleans(),
    prompt=st.lists(st.integers(1, 49), min_size=1, max_size=13),
    max_tokens=st.integers(1, 12),
    stops=st.sampled_from([(), (EOS,), tuple(range(12))]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    step=st.sampled_from([2, 3, 64]),
)
def test_a_search_alone(
    width: int,
    answers: int,
    penalty: float,
    early: bool,
    prompt: list[int],
    max_tokens: int,
    stops: tuple[int, ...],
    block_size: int,
    step: int,
) -> None:
    beams = BeamParams(width, min(width, answers), penalty, early)
    bench = Bench(
        config(), facts(num_blocks=150, block_size=block_size, max_num_batched_tokens=step), depth=1
    )
    request = searched(0, prompt, beams, max_tokens, stop_token_ids=stops)
    bench.serve(request)
    check(bench, request)
    assert bench.scheduler.cache.pool.free == 150 and len(bench.scheduler.cache.free_slots) == 8


@pytest.mark.turns
@pytest.mark.parametrize("part", range(8))
def test_random_traces_with_searches(part: int) -> None:
    seen, kind = Counter[str](), part // 2
    for seed in range(part * 75, (part + 1) * 75):
        rnd = random.Random(seed)
        windows = WINDOWS[seed % len(WINDOWS)] if kind == 1 else (0,)
        bench, requests = random_bench(rnd, windows, media=kind == 2)
        requests = [(client, with_search(rnd, request)) for client, request in requests]
        todo, aborted = deque(requests), set[tuple[int, int]]()
        while todo or bench.scheduler.live or bench.in_flight:
            if todo and rnd.random() < 0.7:
                client, request = todo.popleft()
                bench.add(request, client)
            if kind == 3 and bench.scheduler.live and rnd.random() < 0.1:
                key = rnd.choice(sorted(bench.scheduler.live))
                aborted.add(key)
                bench.abort(key)
            assert bench.step() or todo or not bench.scheduler.live, f"stuck with seed {seed}"
            assert bench.now < 9000, f"no end with seed {seed}"
        assert bench.scheduler.cache.pool.free == bench.facts.num_blocks
        for client, request in requests:
            if (client, request.id) in aborted or isinstance(request.params, Pooling):
                continue
            first = bench.outputs[client, request.id][0]
            if isinstance(first, Failed):
                assert request.beams is not None and first.code == 400
                seen["refused"] += 1
            elif request.beams is not None:
                check(bench, request, client)
                seen["searches"] += 1
                seen["preempted"] += bench.outputs[client, request.id][-1].timing.preemptions  # pyright: ignore
            else:
                params = request.params
                stops, least = params.stop_token_ids, params.min_tokens
                expected = reference(seen_tokens(request), params.max_tokens, stops, least)
                assert bench.text(request.id, client) == expected
    assert seen["searches"] > 50 and seen["preempted"] > 5


def with_search(rnd: random.Random, request: Add) -> Add:
    """The same request, or a search with the same prompt."""
    if isinstance(request.params, Pooling) or rnd.random() < 0.5:
        return request
    beams = BeamParams(rnd.choice([1, 2, 2, 3, 4]), 1, rnd.choice([1.0, 0.0]), rnd.random() < 0.2)
    kept = {name: getattr(request, name) for name in ("priority", "salt", "media", "owner", "weight")}
    max_tokens = request.params.max_tokens
    return searched(request.id, request.tokens, beams, max_tokens, **kept)


def test_answers_share_the_blocks_that_they_have_in_common() -> None:
    bench = Bench(config(), facts(num_blocks=64, block_size=4))
    bench.add(searched(0, list(range(1, 41)), BeamParams(4, 4), 9, stop_token_ids=()))
    used = [len(set(range(64))) - bench.scheduler.cache.pool.free for _ in range(8) if bench.step()]
    assert 10 < max(used) <= 10 + 4 * 2


def test_a_shared_prompt_is_computed_once() -> None:
    bench = Bench(config(), facts(num_blocks=64, block_size=4))
    prompt = list(range(1, 22))
    bench.serve(add(0, prompt))
    again = searched(1, prompt, BeamParams(3, 3))
    bench.serve(again)
    check(bench, again)
    assert bench.cached(1) == 20


def test_the_logprobs_of_each_token_are_told_if_asked() -> None:
    bench = Bench(config(), facts())
    beams = BeamParams(2, 2, logprobs=1)
    bench.serve(searched(0, [5, 6, 7], beams, stop_token_ids=()))
    for beam in bench.last(0).beams:
        assert [entry.ids[0] for entry in beam.logprobs] == beam.tokens
        assert sum(entry.values[0] for entry in beam.logprobs) == pytest.approx(beam.total)
        assert all(len(entry.ids) == 2 and entry.values[1] >= entry.values[0] for entry in beam.logprobs)


@pytest.mark.parametrize(
    ("beams", "changes", "reason"),
    [
        (BeamParams(9), {}, "follows 1 to 8 answers"),
        (BeamParams(0, 0), {}, "follows 1 to 8 answers"),
        (BeamParams(2, 3), {}, "has 1 to 2 answers, not 3"),
        (BeamParams(2, 1, 11.0), {}, "length_penalty must be from -10 to 10"),
        (BeamParams(2), {"logprobs": None}, "needs 4 logprobs"),
        (BeamParams(2), {"temperature": 1.0}, "draws nothing"),
        (BeamParams(8), {"max_tokens": 100}, "may need"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    beams: BeamParams, changes: dict[str, object], reason: str
) -> None:
    bench = Bench(config(), facts())
    bench.add(searched(0, [1, 2, 3], beams, **changes))
    (only,) = bench.outputs[0, 0]
    assert isinstance(only, Failed) and reason in only.message and only.code == 400
