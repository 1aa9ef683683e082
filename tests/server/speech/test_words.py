"""Times of words: the warping against transformers', and how tokens join to words."""

import numpy as np
import pytest

from server.speech.transcription import TimedWord
from server.speech.words import split_words, token_times, warp, without_silence


@pytest.mark.parametrize("shape", ((1, 1), (1, 9), (7, 1), (7, 30), (30, 7)))
def test_the_way_is_that_of_transformers(shape: tuple[int, int]) -> None:
    from transformers.models.whisper.generation_whisper import (
        _dynamic_time_warping,  # pyright: ignore[reportPrivateUsage]
    )

    for seed in range(5):
        matrix = np.random.default_rng(seed).standard_normal(shape)
        rows, columns = _dynamic_time_warping(-matrix)
        found = warp(matrix)
        assert (found[0].tolist(), found[1].tolist()) == (rows.tolist(), columns.tolist())
        jumps = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
        assert token_times(matrix).tolist() == pytest.approx((columns[jumps] * 0.02).tolist())


def words(pieces: list[str], language: str = "en") -> list[tuple[str, int]]:
    data = [piece.encode() for piece in pieces]

    def decode(tokens: object) -> str:
        return b"".join(data[token] for token in tokens).decode("utf-8", "replace")  # pyright: ignore

    return [(word.text, word.tokens) for word in split_words(range(len(pieces)), decode, language)]


def test_words_end_at_spaces_and_keep_their_marks() -> None:
    assert words([" Hel", "lo", ",", " wor", "ld", "!", ' "', "Yes", '"']) == [
        (" Hello,", 3),
        (" world!", 3),
        (' "Yes"', 3),
    ]


def test_languages_without_spaces_have_characters() -> None:
    assert words(["今日", "は", "。"], "ja") == [("今日", 1), ("は。", 2)]


def test_a_character_of_several_tokens_is_one() -> None:
    raw = "é".encode()
    pieces = [b" caf", raw[:1], raw[1:]]

    def decode(tokens: object) -> str:
        return b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")  # pyright: ignore

    assert split_words([0, 1, 2], decode, "fr") == [(" café", 3)]


def test_a_pause_belongs_to_no_word() -> None:
    spoken = [TimedWord("My", 1.0, 3.3), TimedWord("train", 3.3, 3.5), TimedWord("leaves", 3.5, 7.4)]
    cut = without_silence(spoken, 3.0, 4.6)
    assert cut == [TimedWord("My", 2.6, 3.3), spoken[1], TimedWord("leaves", 3.5, 4.6)]
    assert without_silence(spoken, 1.4, 7.0) == spoken, "times of segments are not so exact either"
    assert without_silence(spoken, 3.4, 3.4) == spoken and without_silence([], 0.0, 1.0) == []
