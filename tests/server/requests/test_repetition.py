"""Answers that repeat themselves are found as vLLM's own definition finds them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BadRequest
from server.requests.repetition import LoopFinder, RepetitionDetectionParams


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether the tail is so many copies of a pattern of one of the sizes, by the definition."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        tail = tokens[-size * params.min_count :]
        if len(tail) == size * params.min_count and tail == tail[:size] * params.min_count:
            return True
    return False


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6), st.integers(0, 6), st.integers(2, 4))
def test_a_tail_is_found_where_the_definition_has_it(
    tokens: list[int], most: int, least: int, count: int
) -> None:
    params = RepetitionDetectionParams(most, min(least, most), count)
    finder = LoopFinder(params)
    found = [finder.push(token) for token in tokens]
    assert found == [repeats(tokens[: at + 1], params) for at in range(len(tokens))]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ((-1, 0, 2), r"max_pattern_size must be in \[0, 1024\], got -1"),
        ((1025, 0, 2), r"max_pattern_size must be in \[0, 1024\], got 1025"),
        ((4, 5, 2), r"min_pattern_size must be in \[0, 4\].*got 5"),
        ((4, 1, 1), "min_count must be at least 2, got 1"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(params: tuple[int, int, int], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        RepetitionDetectionParams(*params).check()
