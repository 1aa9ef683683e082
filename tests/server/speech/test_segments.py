"""Segments of a piece, the text that is certain while tokens come, and subtitles to the byte."""

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from speech_engines import KNOWN, STAMP

from server.speech.subtitles import srt, vtt
from server.speech.temperature_fallback import Thresholds, average_logprob, compression_ratio
from server.speech.window_decoding import CertainText, cut_spans


def stamps(*values: int) -> list[int]:
    """Small numbers are text, and those from 1000 on timestamps."""
    return [STAMP + value - 1000 if value >= 1000 else value for value in values]


def cut(*values: int, frames: int = 3000) -> tuple[list[tuple[int, int]], int]:
    spans, advance = cut_spans(stamps(*values), frames, KNOWN)
    return [(span.start, span.end) for span in spans], advance


def test_what_follows_the_last_closed_segment_is_read_again() -> None:
    assert cut(1000, 7, 1100, 1100, 8, 9) == ([(0, 200)], 200)
    assert cut(1000, 7, 1100, 1100, 8, 1200, 1200) == ([(0, 200), (200, 400)], 400)


def test_a_single_timestamp_at_the_end_says_that_nothing_follows() -> None:
    assert cut(1000, 7, 1100, 1100, 8, 1200) == ([(0, 200), (200, 400)], 3000)


def test_a_piece_without_a_closed_segment_is_a_whole_one() -> None:
    assert cut(1000, 7, 8) == ([(0, 3000)], 3000)
    assert cut(1000, 7, 8, 1050, frames=800) == ([(0, 100)], 800)
    assert cut(frames=800) == ([(0, 800)], 800)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(1, 9), st.integers(1000, 1009)), max_size=12))
def test_certain_text_is_never_taken_back(values: list[int]) -> None:
    tokens, certain = stamps(*values), CertainText(KNOWN)
    told = [token for each in tokens for token in certain.push(each)]
    spans, _ = cut_spans(tokens, 3000, KNOWN)
    kept = [token for span in spans for token in span.tokens if KNOWN.is_text(token)]
    assert kept[: len(told)] == told
    assert told + certain.end() == kept


def test_quality_is_openais() -> None:
    assert compression_ratio("la " * 200) > 2.4 > compression_ratio("The quick brown fox jumps over it.")
    assert average_logprob([-1.0, -2.0]) == -1.5
    good = Thresholds()
    assert (good.is_good(2.4, -1.0), good.is_good(2.5, 0.0), good.is_good(1.0, -1.1)) == (True, False, False)
    assert (good.is_silent(0.7, -1.1), good.is_silent(0.7, -0.9), good.is_silent(0.5, -3)) == (1, 0, 0)


class Title(NamedTuple):
    start: float
    end: float
    text: str


TITLES = (Title(0.0, 1.5, " Hello\nworld"), Title(3661.0049, 3662.9996, "a --> b"))


def test_subtitles_to_the_byte() -> None:
    assert srt(TITLES) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello world\n\n2\n01:01:01,005 --> 01:01:03,000\na -> b\n\n"
    )
    assert vtt(TITLES) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello world\n\n01:01:01.005 --> 01:01:03.000\na -> b\n\n"
    )


def test_what_is_markup_in_webvtt_is_text() -> None:
    titles = [Title(0.0, 1.0, " R&D <i> 3 < 4")]
    assert vtt(titles).splitlines()[3] == "R&amp;D &lt;i> 3 &lt; 4"
    assert srt(titles).splitlines()[2] == "R&D <i> 3 < 4"
