"""The line that predicts the time of steps: it finds what each term takes, and noise does not mislead it."""

import random
from collections.abc import Callable

import pytest

from engine_core.scheduling.step_time_model import StepTime, Work

TRUE = [6e-3, 2.8e-4, 2e-8, 1e-4, 2e-3]
"""The seconds of each term."""


def work(rng: random.Random) -> Work:
    tokens, rows = rng.choice([1, 1, 4, 32, 128, 700]), rng.randint(1, 8)
    return [1.0, tokens, tokens * rng.randint(1, 2000), rows, 0.0]


def chunk(tokens: int, start: int) -> Work:
    """A step that reads so many tokens of a prompt from a position on."""
    return [1.0, tokens, tokens * start + tokens * tokens // 2, 1.0, 0.0]


def seconds_of(each: Work, true: list[float] = TRUE) -> float:
    return sum(seconds * amount for seconds, amount in zip(true, each, strict=True))


def predicted(step_time: StepTime, each: Work) -> float:
    _, tokens, reads, rows, embeddings = each
    rest = step_time.sample * rows + step_time.encoding(embeddings)
    return step_time.step + step_time.tokens(tokens, reads) + rest


def learned(timed: float, steps: int, noise: Callable[[random.Random], float] = lambda rng: 1.0) -> StepTime:
    """What has learned from so many steps, after a first one of a single token that took `timed` seconds."""
    step_time, rng = StepTime([(1, timed)]), random.Random(1)
    for _ in range(steps):
        each = work(rng)
        step_time.learn(each, seconds_of(each) * noise(rng), fills=True)
    return step_time


def error_of_most(step_time: StepTime) -> float:
    """The relative error within which 9 of 10 steps are predicted."""
    rng = random.Random(2)
    errors = [
        abs(predicted(step_time, each) / seconds_of(each) - 1) for each in (work(rng) for _ in range(200))
    ]
    return sorted(errors)[180]


@pytest.mark.parametrize("guess", [1e-3, 1e-2, 1e-1])
def test_it_finds_what_terms_take_within_a_hundred_steps_whatever_the_first_guess(guess: float) -> None:
    assert error_of_most(learned(guess, 100)) < 0.05


def test_steps_that_take_ten_times_as_long_now_and_then_move_it_little() -> None:
    assert error_of_most(learned(6e-3, 300, lambda rng: 10 if rng.random() < 0.05 else 1)) < 0.1


def test_a_machine_that_becomes_slower_is_followed_within_64_steps() -> None:
    step_time = learned(6e-3, 300)
    rng = random.Random(4)
    for _ in range(64):
        each = work(rng)
        step_time.learn(each, 3 * seconds_of(each), fills=True)
    each = chunk(100, 500)
    assert predicted(step_time, each) == pytest.approx(3 * seconds_of(each), rel=0.2)


@pytest.mark.parametrize("read", [5e-9, 4e-8, 6e-7])
def test_a_long_prompt_after_many_short_ones_teaches_what_attention_takes_and_nothing_else(
    read: float,
) -> None:
    true = [*TRUE[:2], read, *TRUE[3:]]
    step_time, rng = StepTime([(1, 6.4e-3), (16, 10.6e-3)]), random.Random(3)

    def run(each: Work) -> None:
        step_time.learn(each, seconds_of(each, true) * rng.uniform(0.9, 1.1), fills=True)

    for _ in range(300):
        run(chunk(rng.choice([1, 1, 30, 100]), rng.randint(50, 300)))
    for start in range(0, 3000, 60):
        run(chunk(60, start))
    for each in (chunk(1, 200), chunk(100, 100), chunk(30, 2500)):
        assert predicted(step_time, each) == pytest.approx(seconds_of(each, true), rel=0.12)


def test_what_prompts_take_is_still_known_after_many_single_tokens() -> None:
    step_time = learned(6e-3, 300)
    for _ in range(1000):
        step_time.learn(chunk(1, 300), seconds_of(chunk(1, 300)), fills=False)
    each = chunk(600, 1000)
    assert predicted(step_time, each) == pytest.approx(seconds_of(each), rel=0.1)


def test_long_steps_are_learned_from_within_seconds() -> None:
    step_time, each = (
        StepTime([(1, seconds_of(chunk(1, 0))), (101, seconds_of(chunk(101, 0)))]),
        chunk(2000, 0),
    )
    for _ in range(33):
        step_time.learn(chunk(1, 300), seconds_of(chunk(1, 300)), fills=False)
    took = 1.25 * predicted(step_time, each)
    for _ in range(5):
        step_time.learn(each, took, fills=True)
    assert predicted(step_time, each) == pytest.approx(took, rel=0.05)


def test_warm_up_gives_the_first_line() -> None:
    step_time = StepTime([(16, 0.5), (1, 0.010), (16, 0.025)])  # the first of all is slow, and not believed
    assert step_time.tokens(1, 0) == pytest.approx(0.001)
    assert step_time.step == pytest.approx(0.009)


def test_as_many_tokens_fit_as_take_the_time() -> None:
    step_time = learned(6e-3, 100)
    for start in (0, 1000, 20_000):
        for seconds in (1e-3, 5e-2, 1.0):
            count = step_time.fitting(seconds, start)
            assert step_time.tokens(count, count * start + count * count / 2) <= seconds * 1.001
            more = count + 1
            assert step_time.tokens(more, more * start + more * more / 2) > seconds * 0.999


def test_the_margin_is_what_nearly_all_steps_keep_that_fill_their_bound() -> None:
    step_time, rng, late = StepTime([(1, 6e-3), (101, 34e-3)]), random.Random(3), 0
    for step in range(2000):
        each = chunk(100, 50)
        took = seconds_of(each) * rng.uniform(0.9, 1.2)
        late += step >= 1000 and took > predicted(step_time, each) * step_time.margin
        step_time.learn(each, took, fills=True)
    assert 1.0 < step_time.margin < 1.3
    assert 0.001 < late / 1000 < 0.03


def test_a_step_without_time_teaches_nothing() -> None:
    step_time = StepTime([(1, 6e-3)])
    step_time.learn(chunk(10, 0), 0.0, fills=False)
    assert step_time.step == StepTime([(1, 6e-3)]).step
