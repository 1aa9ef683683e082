"""The rounds of a beam search find what vLLM's rule finds, and report what is asked."""

from collections.abc import Iterator
from zlib import crc32

import pytest
from beam_rule import search, told
from hypothesis import given, settings
from hypothesis import strategies as st

from server.requests.beam_search import FIRST_ROUND, Beam, BeamParams, BeamRound, BeamRules, advance
from worker.protocol import TokenLogprobs


def likely(tokens: list[int], count: int) -> list[tuple[int, float]]:
    """A model of 50 tokens whose logprobs are noise that all tokens before decide."""
    values = {token: -(crc32(b"%r %d" % (tokens, token)) % 100_003) / 20_000 for token in range(50)}
    return sorted(values.items(), key=lambda each: -each[1])[:count]


def entry(tokens: list[int], count: int) -> TokenLogprobs:
    """The same in the form of a worker, which tells the sampled token first."""
    ids, values = zip(*likely(tokens, 50 if count == -1 else count), strict=True)
    return TokenLogprobs([ids[0], *ids], [values[0], *values], 1)


def rounds_of(rules: BeamRules, prompt: list[int]) -> Iterator[BeamRound]:
    """All rounds, to the one that follows no answer."""
    round = FIRST_ROUND
    while round.followed:
        asked = rules.sampling(round).logprobs
        assert asked is not None
        round = advance(round, [entry([*prompt, *beam.tokens], asked) for beam in round.followed], rules)
        yield round


def rules_of(params: BeamParams, prompt: list[int], most: int = 6, stops: tuple[int, ...] = ()) -> BeamRules:
    return BeamRules(params, frozenset(stops), len(prompt), len(prompt) + most)


@settings(max_examples=150, deadline=None)
@given(
    width=st.integers(1, 5),
    penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0, 0.6]),
    early=st.booleans(),
    prompt=st.lists(st.integers(1, 49), min_size=1, max_size=13),
    most=st.integers(1, 12),
    stops=st.sampled_from([(), (2,), tuple(range(12))]),
)
def test_a_search_finds_what_the_rule_finds(
    width: int, penalty: float, early: bool, prompt: list[int], most: int, stops: tuple[int, ...]
) -> None:
    params = BeamParams(width, penalty, early)
    *_, last = rounds_of(rules_of(params, prompt, most, stops), prompt)
    expected = search(likely, prompt, params, most, stops)
    assert [(tokens, finish) for tokens, _, finish in told(last.found)] == [
        (tokens, finish) for tokens, _, finish in expected
    ]
    assert [beam.total for beam in last.found] == [pytest.approx(total) for _, total, _ in expected]


def test_a_search_ends_when_nothing_better_can_come() -> None:
    def end_or(other: float) -> TokenLogprobs:
        return TokenLogprobs([2, 2, 9], [-0.1, -0.1, other], 1)

    rules = rules_of(BeamParams(1, 0.0), [1], 100, stops=(2,))
    assert advance(FIRST_ROUND, [end_or(-5.0)], rules) == ([], [Beam([2], -0.1, finish="stop")])
    assert advance(FIRST_ROUND, [end_or(-0.05)], rules).followed == [Beam([9], -0.05)]


@pytest.mark.parametrize(("shown", "told_each"), [(None, 0), (1, 2), (7, 8), (-1, 51)])
def test_the_logprobs_of_each_token_are_told_if_asked(shown: int | None, told_each: int) -> None:
    *_, last = rounds_of(rules_of(BeamParams(2, logprobs=shown), [5, 6, 7]), [5, 6, 7])
    for beam in last.found:
        assert [len(each.ids) for each in beam.logprobs] == [told_each] * (6 if told_each else 0)
        if told_each:
            assert [each.ids[0] for each in beam.logprobs] == beam.tokens
            assert sum(each.values[0] for each in beam.logprobs) == pytest.approx(beam.total)


def test_each_round_asks_for_one_token_more() -> None:
    rules = rules_of(BeamParams(2), [5, 6, 7], most=3)
    first = rules.sampling(FIRST_ROUND)
    assert (first.max_tokens, first.temperature, first.logprobs, first.stop_token_ids) == (1, 0.0, 4, ())
    second, third, last = rounds_of(rules, [5, 6, 7])
    assert [rules.sampling(each).max_tokens for each in (second, third)] == [2, 3] and not last.followed
