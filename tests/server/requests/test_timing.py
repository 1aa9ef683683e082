"""The arithmetic of a request's times: parts that add up, of one sequence or of several."""

import pytest

from engine_core.engine_stats import Timing
from engine_core.protocol import Pooled
from server.requests.timing import RequestTimes, TimingReport
from worker.protocol import Vectors

NOTHING = Vectors(b"", (0,))
PARTS = ("tokenize_ms", "queue_ms", "prefill_ms", "decode_ms", "answer_ms")


def timing(queued: float, prefill: float, decode: float, **more: float) -> Timing:
    return Timing(queued=queued, prefill=prefill, decode=decode, preemptions=0, **more)  # pyright: ignore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("server.requests.timing.time.monotonic", clock)
    return clock


def exact_sum(report: TimingReport) -> int:
    """The sum of the parts in microseconds, as a reader of the written numbers computes it."""
    return sum(round(1000 * getattr(report, part)) for part in PARTS)


def test_each_part_has_its_time(clock: Clock) -> None:
    times = RequestTimes()
    clock.now += 0.002
    times.submit()
    clock.now += 1.0
    times.submit()  # the next texts of the request
    times.add(timing(0.1, 0.2, 0.3, steps=9, compute=0.05))
    times.cached_tokens = 4
    assert times.report() == TimingReport(
        tokenize_ms=2.0,
        queue_ms=100.0,
        prefill_ms=200.0,
        decode_ms=300.0,
        answer_ms=400.0,
        total_ms=1002.0,
        compute_ms=50.0,
        steps=9,
        preemptions=0,
        cached_tokens=4,
        expected_first_token_ms=None,
    )


def test_the_parts_add_up_to_the_last_digit(clock: Clock) -> None:
    times = RequestTimes()
    clock.now += 1 / 3000
    times.submit()
    clock.now += 1 / 7
    times.add(timing(1 / 90, 1 / 70, 1 / 1100))
    report = times.report()
    assert exact_sum(report) == round(1000 * report.total_ms) == round(1_000_000 * (1 / 3000 + 1 / 7))


def test_of_several_choices_the_last_one_tells_the_times_and_all_add_to_the_cost() -> None:
    times = RequestTimes()
    times.add(timing(0.5, 1, 1, steps=3, compute=0.25))
    times.add(Timing(queued=0.25, prefill=1, decode=2, preemptions=2, steps=4, compute=0.5))
    assert (times.queued_time, times.prefill_time, times.decode_time) == (0.25, 1, 2)
    assert (times.compute_time, times.steps, times.preemptions) == (0.75, 7, 2)


def test_of_texts_sent_at_once_the_longest_counts_and_what_is_sent_in_turn_adds_up() -> None:
    times = RequestTimes()
    first = [timing(1, 1, 0, steps=1, compute=0.5), timing(2, 0.5, 0, steps=2, compute=0.25)]
    times.add_round([Pooled(0, NOTHING, timing=one, expected=2.0 + one.queued) for one in first])
    times.add_round([Pooled(0, NOTHING, timing=timing(0, 4, 0, steps=1, compute=1), expected=3.0)])
    times.add_round([Pooled(0, NOTHING)])  # an engine that says nothing
    assert (times.queued_time, times.prefill_time, times.decode_time) == (2, 4.5, 0)
    assert (times.compute_time, times.steps, times.expected) == (1.75, 4, 7.0)


def test_headers(clock: Clock) -> None:
    times = RequestTimes()
    assert times.headers() == [], "the engine was not asked"
    clock.now += 0.001
    times.submit()
    clock.now += 0.01
    times.add(timing(0.002, 0.003, 0.004, compute=0.0051))
    written = (
        b"tokenize;dur=1.000, queue;dur=2.000, prefill;dur=3.000, decode;dur=4.000, answer;dur=1.000, "
        b"compute;dur=5.100, total;dur=11.000"
    )
    assert times.headers() == [(b"server-timing", written)]
    times.expected = 1.23456
    expected = (b"x-facet-expected-first-token-ms", b"1234.6")
    assert times.headers() == [(b"server-timing", written), expected]
    assert times.expected_header() == [expected]
