"""Cases in which any two values of two parameters meet: few faults take three values together."""

from collections.abc import Sequence
from itertools import combinations, product

import pytest

Pair = tuple[tuple[int, int], ...]
"""Two places of parameters, each with the place of a value."""


def by_pairs(**choices: Sequence[object]) -> pytest.MarkDecorator:
    """Parametrize a test by few cases: each is the one that brings most pairs which no other has brought."""
    values = [*choices.values()]
    cases = [*product(*(range(len(each)) for each in values))]
    left = set[Pair]().union(*map(_pairs, cases))
    chosen: list[tuple[object, ...]] = []
    while left:
        best = max(cases, key=lambda case: len(left & _pairs(case)))
        left -= _pairs(best)
        chosen.append(tuple(each[place] for each, place in zip(values, best, strict=True)))
    return pytest.mark.parametrize(tuple(choices), chosen)


def _pairs(case: Sequence[int]) -> set[Pair]:
    return set(combinations(enumerate(case), 2))
