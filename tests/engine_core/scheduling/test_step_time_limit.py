"""The default bound of steps: it grows with what waits. The clock is a script: no machine disturbs it."""

import itertools

import pytest
from scheduler_bench import add
from scripted_clock import STEP, TOKEN, Clock, stream, texts


def test_the_default_gap_grows_with_the_rows_that_decode() -> None:
    """Else prompts would get the quarter that is left of a gap which decoding fills."""
    clock = Clock(gap_ms=None)
    for id in range(1, 61):
        clock.add(stream(id))
    clock.steps(60)
    alone = clock.seconds[-1]
    clock.add_all(texts(range(100, 160)))
    clock.steps(3)
    assert alone == pytest.approx(STEP + 60 * TOKEN)
    assert 2.5 * alone < clock.seconds[-2] < 4.01 * alone


@pytest.mark.parametrize(
    ("streams", "newcomers", "least", "most"),
    [
        (1, 8, 0.04, 0.05),
        (1, 32, 0.04, 0.05),
        (30, 0, 0.014, 0.016),
        (30, 1, 0.06, 0.08),
        (30, 20, 0.07, 0.09),
    ],
)
def test_the_default_gap_grows_with_newcomers_to_six_times_what_the_rows_that_decode_take(
    streams: int, newcomers: int, least: float, most: float
) -> None:
    """A single reader gains nothing by wider steps, and newcomers little: they have most of each step."""
    clock = Clock(gap_ms=None)
    clock.add_all(stream(id, max_tokens=500) for id in range(1, 1 + streams))
    clock.steps(2)
    clock.add_all(add(id, [id, 1] * 128, max_tokens=2, streams=True) for id in range(40, 40 + newcomers))
    clock.step()
    assert least < clock.seconds[-1] < most
    clock.steps(50)
    assert clock.seconds[-1] < 0.016, "and shrinks when they have been answered"


def test_the_gap_that_was_asked_for_does_not_grow() -> None:
    clock = Clock(gap_ms=50)
    clock.add(stream(1, max_tokens=500))
    clock.steps(2)
    clock.add_all(add(id, [id, 1] * 128, max_tokens=2, streams=True) for id in range(2, 34))
    clock.steps(10)
    assert max(clock.seconds[2:]) < 0.051


def figures(count: int, gap_ms: float | None) -> tuple[float, float, float]:
    """The tokens per second, the median first token and the 99th percentile of gaps, of so many clients that
    send four requests each, one after the other."""
    clock, sent = Clock(gap_ms=gap_ms), dict[int, float]()
    begun = clock.now

    def send() -> None:
        id = len(sent) + 1
        sent[id] = clock.now
        clock.add(add(id, [1 + id % 40, 1 + id // 40] * 128, max_tokens=64, streams=True))

    for _ in range(count):
        send()
    while clock.scheduler.live:
        ended = set(clock.scheduler.live)
        clock.step()
        for _ in range(min(len(ended - clock.scheduler.live.keys()), 4 * count - len(sent))):
            send()
    times = {id: [at for at, _ in outputs] for id, outputs in clock.outputs.items()}
    firsts = sorted(times[id][0] - at for id, at in sent.items())
    gaps = sorted(after - at for each in times.values() for at, after in itertools.pairwise(each))
    return 64 * len(sent) / (clock.now - begun), firsts[len(firsts) // 2], gaps[len(gaps) * 99 // 100]


@pytest.mark.parametrize(("count", "most_gap"), [(8, 0.15), (32, 0.25)])
def test_the_default_gap_costs_few_tokens_and_no_first_tokens(count: int, most_gap: float) -> None:
    (tokens, first, gap), (fastest, its_first, _) = figures(count, None), figures(count, 0)
    assert tokens > 0.95 * fastest
    assert first < 1.5 * its_first
    assert gap < most_gap
