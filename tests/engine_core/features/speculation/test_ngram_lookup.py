"""Guesses from the text itself: which place is found, how it is followed, and what is guessed behind it."""

import random

import pytest

from engine_core.features.speculation.ngram_lookup import STRONGEST, Lookup


def looked_up(tokens: list[int], least: int = 2, most: int = 4) -> Lookup:
    lookup = Lookup(tokens, 1000, least, most)
    lookup.enter()
    return lookup


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    assert looked_up([5, 1, 2, 3, 1, 2, 3]).draft(7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_place_is_kept_while_its_tokens_come_and_is_sought_anew_when_another_one_does() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 3, 4, 8, 9, 1, 2]
    lookup = looked_up(tokens)
    for token, strength, expected in ((3, 3, 4), (4, 4, 5), (8, 3, 9), (0, 0, -1)):
        tokens.append(token)
        lookup.follow()
        assert (lookup.strength, lookup.expected) == (strength, expected)


def test_a_match_counts_no_longer_than_the_strongest() -> None:
    lookup = looked_up(tokens := [1, 2, 1, 2])
    for _ in range(2 * STRONGEST):
        tokens.append(lookup.expected)
        lookup.follow()
    assert lookup.strength == STRONGEST


def test_a_long_text_is_entered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.features.speculation.ngram_lookup._AT_ONCE", 4)
    lookup = looked_up([1, 2, 3, 4, 5, 6, 1, 2])
    assert lookup.strength == 0
    lookup.enter()
    assert lookup.draft(2) == [3, 4]


@pytest.mark.parametrize("least", [1, 2, 3])
def test_it_finds_what_a_plain_search_finds(least: int) -> None:
    rng, most = random.Random(least), 5
    tokens = [rng.randrange(4) for _ in range(20)]
    lookup = looked_up(tokens, least, most)
    for _ in range(60):
        tokens.append(rng.randrange(4))
        lookup.expected = -1  # so that it seeks each time
        lookup.follow()
        agree = [
            max(
                n
                for n in range(min(most, place) + 1)
                if tokens[place - n : place] == tokens[len(tokens) - n :]
            )
            for place in range(len(tokens))
        ]
        longest = max(agree)
        latest = max(place for place, length in enumerate(agree) if length == longest)
        found = (longest, [tokens[latest]]) if longest >= least else (0, [])
        same = sum(tokens[at : at + least] == tokens[-least:] for at in range(len(tokens)))
        assert (lookup.strength, lookup.draft(1)) == found or same > 32


def test_what_follows_tokens_that_must_come() -> None:
    text = [7, 8, 9, 1, 2, 3, 4, 5, 6, 30, 31]
    lookup = looked_up(text)
    assert lookup.strength == 0
    assert lookup.behind([1, 2, 3], 4) == ([4, 5, 6, 30], 3)
    assert lookup.behind([8, 9], 20)[0][:10] == [1, 2, 3, 4, 5, 6, 30, 31, 8, 9]
    assert lookup.behind([50, 51], 3) == ([], 0)
    assert looked_up([1]).behind([2], 3) == ([], 0)


def test_a_match_goes_on_behind_tokens_that_must_come() -> None:
    lookup = looked_up([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert lookup.strength == 3
    assert lookup.behind([4, 5], 3) == ([6, 7, 8], 5)
    assert lookup.behind([4, 5, 6, 7, 8, 1, 2], 2) == ([3, 4], 10)
    assert lookup.behind([4, 5, 6, 7, 8, 1, 2, 3, 4], 3) == ([5, 6, 7], 12), "the text repeats itself"


def test_a_match_longer_than_any_that_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    text = list(range(100, 160))
    lookup = looked_up([*text, *text[:50]], most=60)
    assert lookup.strength == STRONGEST
    assert lookup.draft(3) == [150, 151, 152]
