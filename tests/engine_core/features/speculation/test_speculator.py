"""Guesses for sequences: how many, for which of them, and when none at all."""

from __future__ import annotations

import random

import pytest
from fake_worker import VOCAB
from replayed_texts import Replay, Text, guesser, sequence
from toy_language import Language, ToyMatcher

from engine_core.features.speculation.speculator import Speculator
from engine_core.scheduling.sequence import Sequence

RNG = random.Random(5)
LINE = [RNG.randrange(2000) for _ in range(400)]


def edited(seed: int = 1, length: int = 300) -> Text:
    """A text of random tokens, and the same with a token in 40 replaced."""
    rng = random.Random(seed)
    old = [rng.randrange(2000) for _ in range(length)]
    return old, [rng.randrange(2000) if at % 40 == 20 else token for at, token in enumerate(old)]


def unrelated(seed: int = 1) -> Text:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(200)], [rng.randrange(50) for _ in range(200)]


def test_an_edited_text_is_guessed_several_tokens_at_a_time() -> None:
    replay = Replay(guesser()).run([edited(seed) for seed in range(4)])
    assert replay.tokens / replay.steps > 4
    assert replay.gain > 3.3


def test_nothing_is_guessed_where_it_never_holds_and_steps_are_planned_ahead() -> None:
    replay = Replay(guesser()).run([unrelated(seed) for seed in range(8)])
    assert replay.gain > 0.99
    late = Replay(replay.guesser).run([unrelated(seed) for seed in range(8, 12)])
    assert late.planned_ahead > 0.95 * late.steps
    assert late.gain > 0.995


def test_what_repeats_by_chance_is_hardly_guessed() -> None:
    """Short answers, in which a pair of tokens stood before with something else behind it."""
    rng = random.Random(6)
    chats = [
        ([rng.randrange(25) for _ in range(40)], [rng.randrange(25) for _ in range(15)]) for _ in range(60)
    ]
    replay = Replay(guesser()).run(chats)
    assert replay.guessed - replay.held < 20


def test_beside_others_tokens_are_guessed_for_the_one_that_gains() -> None:
    texts = [edited(1), *(unrelated(seed) for seed in range(3))]
    one = guesser()
    Replay(one).run(texts, at_once=4)
    assert one.totals.guessed > 0
    assert one.totals.held[0] > 0.8 * one.totals.drafts


def test_under_load_nothing_is_guessed_if_rows_take_time() -> None:
    replay = Replay(guesser(), seconds_of=lambda rows: 1e-3 * rows).run([edited(s) for s in range(32)], 32)
    assert replay.gain > 0.99


def test_under_load_tokens_are_guessed_if_rows_take_no_time() -> None:
    replay = Replay(guesser(), seconds_of=lambda rows: 7e-3).run([edited(s) for s in range(8)], 8)
    assert replay.gain > 2.5


def test_what_a_request_and_an_operator_allow_is_kept() -> None:
    prompt = LINE[:50] + LINE[:24]
    one = guesser(most=5, most_sequences=2, most_match=24)
    free, none, two, short = (
        sequence(0, prompt),
        sequence(1, prompt, most_guesses=0),
        sequence(2, prompt, most_guesses=2),
        sequence(3, prompt, most=3),
    )
    for seq in (free, none, two, short):
        one.enter(seq)
    assert one.choose([free, none], 64)[free] == LINE[24:29]
    assert none not in one.choose([free, none], 64)
    assert one.choose([two], 64)[two] == LINE[24:26]
    assert one.choose([short], 64)[short] == LINE[24:26]
    assert len(one.choose([free], 3)[free]) == 2
    assert one.choose([free, two, short], 64) == {}
    assert not one.pays([free, two, short])


def test_nothing_is_weighed_where_there_is_nothing_to_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    one, weighed = guesser(), list[int]()
    choose = one._choose
    monkeypatch.setattr(one, "_choose", lambda seqs, most: weighed.append(len(seqs)) or choose(seqs, most))
    Replay(one).run([(list(range(200)), list(range(200, 400)))] * 4, at_once=4)
    assert not weighed
    Replay(one).run([edited()])
    assert weighed


def test_nothing_pays_while_the_only_answer_with_guesses_is_paused() -> None:
    one = guesser()
    one.enter(sequence(0, LINE[:50] + LINE[:24]))
    assert not one.pays([])


def test_what_became_of_guesses_is_counted() -> None:
    one = guesser(most=3)
    seq = sequence(0, LINE)
    one.enter(seq)
    for guessed, held in ((3, 2), (2, 0), (3, 3)):
        one.landed(seq, guessed, held)
    totals = one.totals
    assert (totals.drafts, totals.guessed, totals.held) == (3, 8, [2, 2, 1])
    one.leave(seq)
    one.leave(seq)


def test_a_sequence_that_was_not_entered_is_passed_over() -> None:
    one, seq = guesser(), sequence(0, LINE + LINE)
    one.follow(seq, 1)
    assert one.choose([seq], 64) == {}


FORCED = Language(width=1, shortest=200)
"""A language of a single text."""


def followed(prompt: list[int], given: ToyMatcher | None = None) -> tuple[Speculator, Sequence, ToyMatcher]:
    """A guesser, and a sequence that a matcher follows."""
    matcher, seq = given or ToyMatcher(FORCED), sequence(0, prompt)
    seq.is_followed = True
    return guesser(forced=lambda _: matcher.forced()), seq, matcher


def forced(count: int) -> list[int]:
    text: list[int] = []
    while len(text) < count:
        text += FORCED.allowed(text)
    return text


def test_tokens_that_must_come_are_guessed_without_a_match() -> None:
    one, seq, matcher = followed([60, 61, 62])
    one.enter(seq)
    assert one.choose([seq], 64) == {seq: forced(5)}
    assert one.pays([seq])
    for count in (2, 4):
        for token in forced(6)[count - 2 : count]:
            seq.tokens.append(token)
            matcher.take(token)
        one.follow(seq, 2)
        assert one.choose([seq], 64) == {seq: forced(count + 5)[count:]}
    assert one.choose([seq], 3) == {seq: forced(6)[4:]}


def test_tokens_that_must_come_are_tried_though_rows_seem_to_take_all_time() -> None:
    """A prompt was held up, and steps of one row each, which are all alike, do not say that it was."""
    one, seq, _ = followed([60, 61, 62])
    one.step_time.learn([1, 4, 10, 1, 0], 0.5, fills=False)
    for _ in range(100):
        one.step_time.learn([1, 1, 10, 1, 0], 0.007, fills=False)
    assert one.step_time.step < 0.1 * one.step_time.row
    one.enter(seq)
    assert one.choose([seq], 64) == {seq: forced(5)}


def test_behind_tokens_that_must_come_earlier_text_goes_on() -> None:
    line = forced(5)
    prompt = [70, *line, 71, 72, 73, 74, 75, 76]
    one, seq, _ = followed(prompt)
    one.enter(seq)
    found = one.choose([seq], 64)[seq]
    assert found[:5] == line and found[5:] == [71, 72, 73, 74, 75, 76][: len(found) - 5] and len(found) > 5


def test_what_is_forced_is_asked_once_for_each_landed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is longer than the most guesses is not found anew behind each of its tokens."""
    asked: list[int] = []
    text = [VOCAB + at for at in range(40)]

    class Long(ToyMatcher):
        def forced(self) -> list[int]:
            asked.append(len(self.taken))
            return text[len(self.taken) :]

    one, seq, matcher = followed([60, 61, 62], Long(Language()))
    one.enter(seq)
    for count in range(40):
        draft = one.choose([seq], 64).get(seq, [])
        assert draft == text[count : count + 8]
        seq.tokens.append(text[count])
        matcher.taken.append(text[count])
        one.follow(seq, 1)
    assert asked == [0, *range(33, 41)]


def test_tokens_that_must_come_say_nothing_of_other_guesses() -> None:
    one, seq, matcher = followed([1, 2, 3, 9, 1, 2])
    one.enter(seq)
    rates = [one._acceptance.rate(strength) for strength in range(1, 25)]
    for token in forced(4):
        seq.tokens.append(token)
        matcher.take(token)
        one.follow(seq, 1)
    assert rates == [one._acceptance.rate(strength) for strength in range(1, 25)]
