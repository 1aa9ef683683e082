"""The line that predicts the time of steps: it finds the true costs, and noise does not mislead it."""

import random

import pytest

from engine_core.scheduling.step_cost import (
    ENCODED,
    FILTERED,
    LOGPROBS,
    PLAIN,
    POOLED,
    READ,
    STEP,
    TOKEN,
    CostLine,
    StepTimes,
    Work,
    sampling_term,
)
from worker.protocol import Pooling, Sampling

TRUE = {
    STEP: 6e-3,
    TOKEN: 2.8e-4,
    READ: 2e-8,
    POOLED: 1e-6,
    PLAIN: 1e-4,
    FILTERED: 3e-4,
    LOGPROBS: 3e-4,
    ENCODED: 2e-3,
}


def work(rng: random.Random) -> Work:
    tokens, rows = rng.choice([1, 1, 4, 32, 128, 700]), rng.randint(1, 8)
    return [1.0, tokens, tokens * rng.randint(1, 2000), rng.choice([0, 0, 200]), rows, 0.0, 0.0, 0.0]


def true_seconds(each: Work) -> float:
    return sum(TRUE[term] * amount for term, amount in enumerate(each))


def predicted(line: CostLine, each: Work) -> float:
    ends = sum(line.end(term, int(each[term])) for term in (POOLED, PLAIN, FILTERED, LOGPROBS))
    return line.step + line.tokens(int(each[TOKEN]), int(each[READ])) + ends


def learned(line: CostLine, steps: int, noise: float = 0.0, seed: int = 1) -> CostLine:
    rng = random.Random(seed)
    for _ in range(steps):
        each = work(rng)
        disturbed = 10 if rng.random() < noise else 1
        line.learn(each, true_seconds(each) * disturbed, fills=True)
    return line


@pytest.mark.parametrize("guess", [1e-3, 1e-2, 1e-1])
def test_it_finds_the_costs_of_steps_whatever_the_first_guess(guess: float) -> None:
    line, rng = learned(CostLine([(1, guess)]), 400), random.Random(2)
    errors = sorted(
        abs(predicted(line, each) / true_seconds(each) - 1) for each in (work(rng) for _ in range(200))
    )
    assert errors[180] < 0.15


@pytest.mark.parametrize("read", [5e-9, 4e-8, 6e-7])
def test_a_long_prompt_after_many_short_ones_teaches_what_attention_costs_and_nothing_else(
    read: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TRUE, READ, read)
    line, rng = CostLine([(1, 6.4e-3), (16, 10.6e-3)]), random.Random(3)

    def run(tokens: int, position: int) -> None:
        each = [1.0, tokens, tokens * position + tokens * tokens // 2, 0.0, 1.0, 0.0, 0.0, 0.0]
        line.learn(each, true_seconds(each) * rng.uniform(0.9, 1.1), fills=True)

    for _ in range(300):
        run(rng.choice([1, 1, 30, 100]), rng.randint(50, 300))
    for position in range(0, 3000, 60):
        run(60, position)
    for tokens, position in ((1, 200), (100, 100), (30, 2500)):
        each = [1.0, tokens, tokens * position + tokens * tokens // 2, 0.0, 1.0, 0.0, 0.0, 0.0]
        assert predicted(line, each) == pytest.approx(true_seconds(each), rel=0.12)


def test_steps_that_take_ten_times_as_long_now_and_then_move_it_little() -> None:
    line, rng = learned(CostLine([(1, 6e-3)]), 600, noise=0.05), random.Random(2)
    errors = sorted(
        abs(predicted(line, each) / true_seconds(each) - 1) for each in (work(rng) for _ in range(200))
    )
    assert errors[180] < 0.15


def test_warm_up_gives_the_first_line() -> None:
    line = CostLine([(16, 0.5), (1, 0.010), (16, 0.025)])  # the first of all is slow, and not believed
    assert line.tokens(1, 0) == pytest.approx(0.001)
    assert line.step == pytest.approx(0.009)


def test_as_many_tokens_fit_as_take_the_time() -> None:
    line = learned(CostLine([(1, 6e-3), (101, 34e-3)]), 400)
    for start in (0, 1000, 20_000):
        for seconds in (1e-3, 5e-2, 1.0):
            count = line.fitting(seconds, start)
            reads = count * start + count * count / 2
            assert line.tokens(count, int(reads)) <= seconds * 1.001
            more = count + 1
            assert line.tokens(more, int(more * start + more * more / 2)) > seconds * 0.999


def test_the_margin_is_what_nearly_all_steps_keep_that_fill_their_bound() -> None:
    line, rng = CostLine([(1, 6e-3), (101, 34e-3)]), random.Random(3)
    late = 0
    for step in range(4000):
        each = [1.0, 100.0, 1e4, 0.0, 1.0, 0.0, 0.0, 0.0]
        ratio = rng.uniform(0.9, 1.2)
        late += step >= 2000 and true_seconds(each) * ratio > predicted(line, each) * line.margin
        line.learn(each, true_seconds(each) * ratio, fills=True)
    assert 1.0 < line.margin < 1.3
    assert 0.001 < late / 2000 < 0.03


def test_a_step_without_time_teaches_nothing() -> None:
    line = CostLine([(1, 6e-3)])
    line.learn([1.0, 10.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], 0.0, fills=False)
    assert line.step == CostLine([(1, 6e-3)]).step


def test_every_kind_of_sampling_is_a_term_of_its_own() -> None:
    assert sampling_term(Sampling(max_tokens=1, temperature=0.7, seed=3)) == PLAIN
    assert sampling_term(Sampling(max_tokens=1, top_p=0.9)) == FILTERED
    assert sampling_term(Sampling(max_tokens=1, repetition_penalty=1.1)) == FILTERED
    assert sampling_term(Sampling(max_tokens=1, top_p=0.9, logprobs=0)) == LOGPROBS
    assert sampling_term(Pooling(task="embed")) == POOLED


def test_it_comes_near_the_99th_percentile() -> None:
    times, draw = StepTimes(), random.Random(1)
    for _ in range(5000):
        times.learn(20, 0.01, draw.uniform(1.0, 2.0))
    assert 1.8 < times.usual(20, 0.01) < 2.5


def test_sizes_do_not_share_it() -> None:
    times = StepTimes()
    for _ in range(100):
        times.learn(1, 0.01, 5.0)
    assert times.usual(1, 0.01) > 4 and times.usual(1000, 0.3) == 0.3


def test_what_is_expected_counts_at_least() -> None:
    times = StepTimes()
    times.learn(1, 0.01, 0.005)
    assert times.usual(1, 2.0) == 2.0


def test_a_step_that_stood_still_teaches_little() -> None:
    times = StepTimes()
    times.learn(1, 0.01, 3600.0)
    assert times.usual(1, 0.01) < 0.012
