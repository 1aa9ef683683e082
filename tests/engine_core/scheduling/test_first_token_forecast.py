"""How long a queue takes: answers of known length, of learned length, and long prompts."""

import itertools
from collections.abc import Iterator

import pytest
from scheduler_bench import add
from scripted_clock import Clock

from engine_core.engine_stats import Rates, expected_length
from engine_core.protocol import AddRequest, Tokens

NEVER = (49,)
"""A stop token that the fake worker's texts of these tests do not have before their limits."""


def requests(prompt: int, max_tokens: int, stops: tuple[int, ...] = ()) -> Iterator[AddRequest]:
    for id in itertools.count(1):
        yield add(id, [1 + id % 40] * prompt, max_tokens=max_tokens, stop_token_ids=stops)


def backlog(clock: Clock, source: Iterator[AddRequest], count: int) -> None:
    clock.add_all(itertools.islice(source, count))


def wait_of_the_last(clock: Clock, source: Iterator[AddRequest]) -> tuple[float, float, float]:
    """The wait that is told at large, that of one more request, and how long that one really waits."""
    told, at = clock.scheduler.stats(clock.now).expected_wait, clock.now
    last = next(source)
    clock.add(last)
    own = clock.scheduler.live[0, last.id].record.expected
    clock.run()
    assert own is not None
    return told, own, clock.outputs[last.id][0][0] - at


@pytest.mark.parametrize("prompt", [8, 600])
@pytest.mark.parametrize("begun", [0, 1, 60])
def test_answers_whose_length_is_known(begun: int, prompt: int) -> None:
    clock = Clock(slots=8)
    source = requests(prompt, max_tokens=100)
    backlog(clock, source, 40)
    clock.steps(begun)
    told, own, waited = wait_of_the_last(clock, source)
    assert waited == pytest.approx(told, rel=0.25)
    assert waited == pytest.approx(own, rel=0.25)


def test_long_prompts_for_short_answers() -> None:
    clock = Clock(slots=8)
    source = requests(4000, max_tokens=1)
    backlog(clock, source, 40)
    told, own, waited = wait_of_the_last(clock, source)
    assert 2 / 3 < told / waited < 1.5
    assert 2 / 3 < own / waited < 1.5


def test_the_length_of_answers_that_never_stop_is_learned_while_they_run() -> None:
    clock = Clock(slots=8)
    source = requests(8, max_tokens=400, stops=NEVER)
    backlog(clock, source, 16)
    clock.steps(300)
    told, own, waited = wait_of_the_last(clock, source)
    assert 0.5 < told / waited < 2
    assert 0.5 < own / waited < 2


def test_the_length_of_answers_that_stop_is_learned() -> None:
    clock = Clock(slots=8)
    source = requests(8, max_tokens=400, stops=tuple(range(0, 50, 12)))  # by chance, after some ten tokens
    backlog(clock, source, 300)
    while len(clock.scheduler.live) > 60:
        clock.step()
    told, own, waited = wait_of_the_last(clock, source)
    ends = [outputs[-1][1] for outputs in clock.outputs.values()]
    assert sum(isinstance(end, Tokens) and end.finish == "stop" for end in ends) > 250
    assert 0.5 < told / waited < 2
    assert 0.5 < own / waited < 2


def test_answers_that_cannot_stop_say_nothing_of_when_others_do() -> None:
    clock = Clock(slots=8)
    backlog(clock, requests(8, max_tokens=400, stops=tuple(range(0, 50, 12))), 40)
    clock.run()
    known = clock.scheduler.stats(clock.now).rates
    clock.add_all(add(1000 + id, [1] * 8 + [2] * 200, max_tokens=201, prompt_len=8) for id in range(20))
    clock.run()
    later = clock.scheduler.stats(clock.now).rates
    assert known is not None and later is not None and later.stop_rate == known.stop_rate > 0.01


def test_a_preempted_or_aborted_answer_is_counted_once() -> None:
    clock = Clock(slots=2)
    source = requests(8, max_tokens=50)
    backlog(clock, source, 4)
    clock.step()
    scheduler = clock.scheduler
    scheduler.preempt(scheduler.running[-1])
    assert scheduler.pace.waits._backlog.answers(0.1) == 49 + 2 * 50  # pyright: ignore[reportPrivateUsage]
    scheduler.abort([(0, 2), (0, 3)], clock.now)
    clock.run()
    assert scheduler.pace.waits._backlog.answers(0.1) == 0  # pyright: ignore[reportPrivateUsage]


def test_rates_tell_how_long_a_backlog_takes() -> None:
    clock = Clock(slots=8)
    backlog(clock, requests(200, max_tokens=50), 40)
    rates = clock.scheduler.stats(clock.now).rates
    assert rates is not None
    at = clock.now
    clock.run()
    assert rates.seconds(40 * 200, 40 * 50) == pytest.approx(clock.now - at, rel=0.25)


def test_an_answer_is_as_long_as_it_may_be_or_ends_before() -> None:
    assert expected_length(400, 0.0) == 400
    assert expected_length(400, 0.1) == pytest.approx(10)
    assert expected_length(1, 0.5) == pytest.approx(0.787, rel=0.01)
    rates = Rates(prompt_rate=1000, step=0.01, step_rows=8, step_prompts=100, stop_rate=0.0)
    assert rates.seconds(0, 800) == pytest.approx(1)
    assert rates.seconds(10_000, 0) == pytest.approx(11)
