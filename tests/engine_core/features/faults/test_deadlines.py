"""Requests that must begin or end by some time, on a clock that a script moves."""

import random
from math import inf

import pytest
from scheduler_bench import add, pool
from scripted_clock import STEP, TOKEN, Clock

from engine_core.features.faults.deadlines import Deadlines
from engine_core.protocol import AddRequest, Failed, Tokens
from engine_core.reason_codes import DEADLINE, TOO_LONG

SINGLE = STEP + TOKEN


def request(id: int, max_tokens: int = 50, **changes: object) -> AddRequest:
    return add(id, [1 + id % 40] * 8, max_tokens=max_tokens, **changes)


def expire(clock: Clock) -> list[Failed]:
    found = clock.scheduler.hooks.get(Deadlines).poll(clock.now, 0).get(0, [])
    assert all(isinstance(one, Failed) for one in found)
    return [one for one in found if isinstance(one, Failed)]


def next_time(clock: Clock) -> float:
    return min([next_time() for next_time in clock.scheduler.hooks.next_time], default=inf)


def occupy(clock: Clock, count: int, **changes: object) -> None:
    """Fill slots with answers that may stop at any token, so that their ends cannot be foreseen."""
    clock.add_all(
        request(id, max_tokens=3000, times_each=True, **changes) for id in range(1000, 1000 + count)
    )
    clock.step()


def tokens_of(clock: Clock, id: int) -> int:
    return sum(len(one.tokens) for _, one in clock.outputs.get(id, []) if isinstance(one, Tokens))


def test_one_that_waits_for_too_long_is_refused() -> None:
    clock = Clock(slots=1)
    occupy(clock, 1)
    clock.scheduler.pace.expected_wait = lambda *_: 0.0  # type: ignore[method-assign] # it hopes for the best
    assert clock.add(request(1, wait=1.0)) is None
    assert next_time(clock) == pytest.approx(clock.now + 1)
    clock.now += 0.999
    assert expire(clock) == []
    clock.now += 0.002
    [failed] = expire(clock)
    assert (failed.id, failed.code, failed.error) == (1, 503, DEADLINE)
    assert not clock.scheduler.waiting.count and next_time(clock) == inf


def test_one_that_is_too_late_to_begin_and_to_end_is_refused_once() -> None:
    clock = Clock(slots=1)
    occupy(clock, 1)
    clock.scheduler.pace.expected_wait = lambda *_: 0.0  # type: ignore[method-assign] # it hopes for the best
    assert clock.add(request(1, wait=1.0, budget=2.0)) is None
    clock.now += 3
    assert [failed.code for failed in expire(clock)] == [503]


def test_one_that_has_begun_in_time_may_go_on() -> None:
    clock = Clock()
    clock.add(request(1, wait=SINGLE, max_tokens=200))
    clock.step()
    clock.now += 100
    assert expire(clock) == []
    clock.run()
    assert tokens_of(clock, 1) == 200


def test_one_that_takes_too_long_ends_and_costs_nothing_more() -> None:
    clock = Clock()
    assert clock.add(request(1, max_tokens=3000, times_each=True, budget=50 * SINGLE)) is None
    clock.add(request(2, max_tokens=3000, times_each=True))
    answers: list[Failed] = []
    for _ in range(60):
        clock.step()
        answers += expire(clock)
    [failed] = answers
    assert (failed.id, failed.code, failed.error) == (1, 504, DEADLINE)
    assert 40 <= tokens_of(clock, 1) <= 51
    before = len(clock.outputs[1])
    for _ in range(3):
        clock.step()
        assert clock.planned is not None
        assert [seq.key[1] for seq in clock.planned.seqs] == [2]
    assert len(clock.outputs[1]) == before
    clock.scheduler.abort([(0, 2)], clock.now)
    assert clock.scheduler.cache.pool.usage == 0 and not clock.scheduler.owners.active


def test_a_step_in_flight_brings_nothing_for_it() -> None:
    clock = Clock()
    clock.add(request(1, max_tokens=3000, times_each=True, budget=1.0))
    clock.step()
    planned = clock.scheduler.schedule(clock.now)
    assert planned is not None
    clock.now += 2
    assert [one.code for one in expire(clock)] == [504]
    output = clock.worker.launch(planned.step).result()
    assert clock.scheduler.results.land(planned, output, clock.now) == {}


def test_what_it_would_need_is_refused_at_once() -> None:
    clock = Clock(slots=1)
    clock.add(request(1, max_tokens=1000))
    clock.step()
    remaining = 999 * SINGLE
    for seconds, taken in ((remaining / 2, False), (remaining * 2, True)):
        answer = clock.add(request(2, wait=seconds))
        assert isinstance(answer, Failed) is not taken
        if isinstance(answer, Failed):
            assert (answer.code, answer.error) == (503, DEADLINE)
            assert answer.message != TOO_LONG  # it has to wait for another one
        else:
            clock.scheduler.abort([(0, 2)], clock.now)
    assert set(clock.scheduler.live) == {(0, 1)} and clock.scheduler.waiting.count == 0


def test_a_sure_length_counts_and_one_that_may_stop_does_not() -> None:
    clock = Clock()
    failed = clock.add(request(1, max_tokens=1000, budget=500 * SINGLE))
    assert isinstance(failed, Failed) and failed.message == TOO_LONG
    assert clock.add(request(2, max_tokens=1000, budget=1100 * SINGLE)) is None
    assert clock.add(request(3, max_tokens=1000, times_each=True, budget=500 * SINGLE)) is None


def test_time_on_the_way_counts() -> None:
    clock = Clock()
    answer = clock.add(AddRequest(id=1, tokens=[1], params=request(1).params, sent=clock.now - 2, budget=1.5))
    assert isinstance(answer, Failed) and answer.code == 503
    assert (
        clock.add(AddRequest(id=2, tokens=[1], params=request(1).params, sent=clock.now - 2, budget=9.0))
        is None
    )
    assert next_time(clock) == pytest.approx(clock.now + 7)


def test_one_that_goes_on_keeps_what_is_left_and_waits_as_long_as_it_must() -> None:
    clock = Clock(slots=1)
    occupy(clock, 1)
    resumed = add(1, [1] * 8 + [2], max_tokens=50, prompt_len=8, wait=0.1, budget=3.0)
    assert clock.add(resumed) is None
    clock.now += 1
    assert expire(clock) == []
    clock.now += 2
    [failed] = expire(clock)
    assert failed.code == 504


def test_paused_sequences_and_texts_end_too() -> None:
    clock = Clock()
    clock.add(request(1, max_tokens=3000, times_each=True, budget=1.0))
    clock.step()
    clock.scheduler.paused.pause([(0, 1)])
    clock.add(pool(2, [1] * 8, budget=1.0))
    clock.now += 2
    assert {one.id: one.code for one in expire(clock)} == {1: 504, 2: 503}
    assert not clock.scheduler.live and not clock.scheduler.paused


def test_those_that_have_ended_are_forgotten() -> None:
    clock = Clock()
    for id in range(2000):
        clock.add(request(id, max_tokens=1, budget=1e6))
        clock.step()
        expire(clock)
    clock.run()
    clock.add(request(5000, max_tokens=2, budget=0.5))
    clock.now += 1
    expire(clock)
    [deadlines] = [each for each in clock.scheduler.hooks.features if isinstance(each, Deadlines)]
    assert len(deadlines._times) < 400  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("seed", range(5))
def test_every_request_has_one_last_answer_and_no_later_than_it_may(seed: int) -> None:
    rng, clock = random.Random(seed), Clock(slots=4)
    ends: dict[int, float] = {}
    last: dict[int, float] = {}

    def collect(answers: list[Failed]) -> None:
        for one in answers:
            assert one.id not in last
            last[one.id] = clock.now

    for id in range(150):
        if rng.random() < 0.6:
            budget = rng.choice([0.0, rng.uniform(0.01, 3)])
            wait = rng.choice([0.0, rng.uniform(0.01, 1)])
            ends[id] = clock.now + (budget or 1e9)
            answer = clock.add(
                request(id, max_tokens=rng.randint(1, 200), times_each=True, wait=wait, budget=budget)
            )
            collect([answer] if isinstance(answer, Failed) else [])
        clock.step()
        collect(expire(clock))
    while clock.step():
        collect(expire(clock))
    for id, answers in clock.outputs.items():
        if any(isinstance(one, Tokens) and one.finish for _, one in answers):
            assert id not in last
            last[id] = answers[-1][0]
    assert last.keys() == ends.keys()
    longest = max(clock.seconds)
    assert all(at <= ends[id] + longest for id, at in last.items())
    assert not clock.scheduler.live and clock.scheduler.cache.pool.usage == 0
