"""Guesses are followed by a fork of the matcher, with the bounds that there would be token by token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from fake_worker import VOCAB
from spelled import allowed_by, byte_spelling, demo_spelling, matcher_of, walk
from toy_language import FORMS, Language, ToyMatcher, bound_of

from engine_core.grammar.draft_bounds import count_fitting, find_bounds
from engine_core.grammar.llguidance_matcher import GrammarMatcher
from engine_core.grammar.matcher import ThinkingMatcher, TokenMatcher, allows
from engine_core.protocol import Grammar, Thinking

SCHEMA = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "maximum": 99},
        "preferred_contact_method": {"enum": ["electronic_mail", "telephone"]},
        "is_returning_customer": {"type": "boolean"},
    },
    "required": ["customer_identification_number", "preferred_contact_method", "is_returning_customer"],
}
LANGUAGE = Language(shortest=20)


def schema_matcher() -> GrammarMatcher:
    spelling = demo_spelling()
    return matcher_of(Grammar("json", json.dumps(SCHEMA)), spelling, len(spelling.tokens))


def text_of(language: Language, count: int) -> list[int]:
    text: list[int] = []
    while len(text) < count:
        text.append(language.allowed(text)[len(text) % 2])
    return text


def test_a_guess_that_ends_the_text_is_left_to_the_row_before_it() -> None:
    short = Language(shortest=3, width=20)
    text = short.reference([1], 30)
    assert count_fitting(ToyMatcher(short), [*text, 7]) == len(text) - 1


def test_bounds_end_where_a_guess_cannot_hold_or_be_followed() -> None:
    text = text_of(LANGUAGE, 8)
    for breaks in (5, -5):  # the fifth token cannot be taken, or no bounds be made for it
        matcher = ToyMatcher(Language(shortest=20, breaks=breaks), text[:2])
        found = [allowed_by(each, VOCAB) for each in find_bounds(matcher, text[2:])]
        assert found == [LANGUAGE.allowed(text[:count]) for count in range(2, 5 if breaks > 0 else 4)]
    foreign = next(token for token in range(VOCAB) if token not in LANGUAGE.allowed(text[:3]))
    assert len(find_bounds(ToyMatcher(LANGUAGE, text[:2]), [text[2], foreign, text[4]])) == 2


@pytest.mark.parametrize("form", FORMS)
def test_a_guess_is_sought_in_bounds_of_any_form(form: str) -> None:
    bound = bound_of([3, 40], VOCAB, form)  # pyright: ignore[reportArgumentType]
    assert [token for token in range(VOCAB) if allows(bound, token)] == [3, 40]


def thinking_matcher() -> TokenMatcher:
    size, marker = len(demo_spelling().tokens), (300, 301)
    sleeping = matcher_of(Grammar("json", json.dumps(SCHEMA), wakes=(marker,)), demo_spelling(), size)
    return ThinkingMatcher(Thinking(3, marker, open=True), 0, sleeping)


MATCHERS: dict[str, Callable[[], TokenMatcher]] = {
    "schema": schema_matcher,
    "text": lambda: matcher_of(
        Grammar("regex", "[a-f ]{5,90}"), demo_spelling(), len(demo_spelling().tokens)
    ),
    "thinking": thinking_matcher,
    "asleep": lambda: matcher_of(Grammar("regex", "(abc)+", wakes=((65, 66),)), byte_spelling(), 256),
    "again": lambda: matcher_of(Grammar("regex", "abc", wakes=((65,),), again=True), byte_spelling(), 256),
}
TEXTS = {"asleep": b"xyzABabcabcabcabc", "again": b"xAabcyyyyAabczAabcx"}


@pytest.mark.parametrize("name", MATCHERS)
def test_bounds_behind_guesses_are_those_token_by_token(name: str) -> None:
    """Matchers that are forked, and asked what is forced, go on as others."""
    size = 256 if name in TEXTS else len(demo_spelling().tokens)
    for seed in range(12):
        rng = random.Random(seed)
        plain, asked = MATCHERS[name](), MATCHERS[name]()
        text = list(TEXTS[name]) if name in TEXTS else walk(MATCHERS[name](), size, rng, 60)
        at = 0
        while at < len(text):
            count = rng.randint(0, 6)
            guesses = [*text[at : at + count], rng.randrange(size), rng.randrange(size)]
            fitting = guesses[: count_fitting(asked, guesses)]
            forced = asked.forced()
            bounds = find_bounds(asked, fitting)
            ahead = plain.fork()
            for place, bound in enumerate(bounds):
                assert ahead.bound() == bound
                if place < len(fitting):
                    ahead.take(fitting[place])
            ahead = plain.fork()
            for token in forced:
                assert allowed_by(ahead.bound(), size) == [token]
                ahead.take(token)
            for token in text[at : at + 1 + rng.randint(0, len(bounds) - 1)]:
                if plain.complete:
                    return
                plain.take(token)
                asked.take(token)
                at += 1
            assert plain.complete == asked.complete


def test_the_keys_of_a_schema_are_forced() -> None:
    matcher = schema_matcher()
    spelling = demo_spelling()
    for token in walk(matcher.fork(), len(spelling.tokens), random.Random(1), 2):
        matcher.take(token)
    forced = b"".join(spelling.tokens[token] for token in matcher.forced())
    assert b"customer_identification_number" in b'{"cu' + forced or forced == b""
    while not (forced := matcher.forced()):
        matcher.take(allowed_by(matcher.bound(), len(spelling.tokens))[0])
    assert len(forced) > 5 and matcher.forced() == forced


def test_the_marker_that_is_due_is_forced() -> None:
    matcher = ThinkingMatcher(Thinking(2, (1, 2, 3), open=True), 0, None)
    assert matcher.forced() == []
    matcher.take(9)
    matcher.take(1)
    assert matcher.forced() == [2, 3]
