"""Answers that are remembered: what is found in them, by whom, and for how long."""

import random

from replayed_texts import Replay, Text, guesser, sequence

from engine_core.features.speculation.suffix_lookup import EndedAnswers, number_of

SIZE = 28 << 10
"""The memory of 1,024 tokens."""


def remembering(*answers: list[int], salt: int = 0, most: int = 100) -> EndedAnswers:
    remembered = EndedAnswers(SIZE, 2, 8, most)
    for answer in answers:
        remembered.add(answer, salt)
    return remembered


def test_what_followed_in_the_answer_with_the_longest_common_end_is_found() -> None:
    answers = remembering([1, 2, 3, 4, 5], [9, 2, 3, 6, 7])
    place, length = answers.find([0, 1, 2, 3], 0)
    assert (answers.following(place, 9), length) == ([4, 5], 3)
    assert answers.find([3, 4, 9], 0) == (0, 0)


def test_the_most_frequent_token_counts_and_then_the_latest_place() -> None:
    answers = remembering([1, 2, 8], [1, 2, 7, 1], [1, 2, 7, 2], [1, 2, 6])
    place, _ = answers.find([1, 2], 0)
    assert answers.following(place, 9) == [7, 2]


def test_a_place_does_not_reach_into_another_answer() -> None:
    answers = remembering([1, 2], [3, 4, 5])
    assert answers.find([2, 3, 4], 0)[1] == 2
    assert answers.find([1, 2], 0) == (0, 0)


def test_answers_to_another_salt_are_not_found() -> None:
    one, other = number_of("one"), number_of("other")
    answers = remembering([1, 2, 3], salt=one)
    assert answers.find([1, 2], other) == (0, 0)
    assert answers.find([1, 2], one)[1] == 2


def test_the_oldest_answers_give_way() -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(9000) for _ in range(100)] for _ in range(40)]
    answers = remembering(*texts[:5])
    place, _ = answers.find(texts[0][:4], 0)
    assert answers.following(place, 2) == texts[0][4:6]
    for text in texts[5:]:
        answers.add(text, 0)
    assert answers.following(place, 2) == []
    found = [answers.find(text[:8], 0)[1] == 8 for text in texts]
    assert found[-9:] == [True] * 9
    assert not any(found[:-11])


def test_so_many_answers_are_remembered_as_an_operator_allows() -> None:
    answers = remembering([1, 2, 3], [4, 5, 6], [7, 8, 9], most=2)
    assert [answers.find(list(end), 0)[1] for end in ((1, 2), (4, 5), (7, 8))] == [0, 2, 2]


def test_an_answer_larger_than_the_memory_is_remembered_in_part() -> None:
    rng = random.Random(2)
    text = [rng.randrange(9000) for _ in range(5000)]
    answers = remembering(text)
    place, length = answers.find(text[:4990], 0)
    assert (answers.following(place, 20), length) == (text[4990:], 8)


def test_the_memory_of_ended_sequences_is_apart_by_salt() -> None:
    one = guesser("suffix")
    rng = random.Random(3)
    answer = [rng.randrange(2000) for _ in range(40)]
    first = sequence(0, [1, 2, 3])
    first.tokens.append(answer[0])
    one.enter(first)
    for token in answer[1:]:
        first.tokens.append(token)
        one.follow(first, 1)
    one.leave(first)
    for id, salt in enumerate(("", "other"), 1):
        again = sequence(id, [1, 2, 3], salt=salt)
        again.tokens.append(answer[0])
        one.enter(again)
        draft = one.choose([again], 64).get(again, [])
        assert draft == answer[1 : 1 + len(draft)]
        assert bool(draft) is not bool(salt)


def variations(count: int) -> list[Text]:
    """Answers of one kind: each is one of four, with a token in ten replaced."""
    rng = random.Random(4)
    kinds = [[rng.randrange(2000) for _ in range(100)] for _ in range(4)]
    prompts = [[rng.randrange(2000) for _ in range(50)] for _ in range(count)]
    return [
        (prompt, [rng.randrange(2000) if rng.random() < 0.1 else token for token in rng.choice(kinds)])
        for prompt in prompts
    ]


def test_answers_like_earlier_ones_come_sooner() -> None:
    texts = variations(40)
    assert Replay(guesser("suffix")).run(texts).gain > 1.5
    assert Replay(guesser("ngram")).run(texts).gain < 1.1
