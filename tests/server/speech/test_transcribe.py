"""Transcriptions with an engine that follows a script: what is tried again, left out, handed on, and lost."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import silence, tone
from speech_engines import KNOWN, STAMP, Script, ScriptedEngine

from models.media.whisper import NO_SOUND, LogMel
from server.speech.silence import Silence, cut_at_silence
from server.speech.speech_model import Draw, Drawn, Piece
from server.speech.temperature_fallback import LADDER
from server.speech.transcribe import TranscriptionJob
from server.speech.transcription import Asked


class Frames:
    def __init__(self, frames: int, levels: Sequence[float] = ()) -> None:
        self.frames = frames
        self.levels = np.array(levels or np.zeros(frames), np.float32)


def decoded(samples: np.ndarray) -> Iterator[np.ndarray]:
    made = LogMel(80)
    yield from made.push((samples * 32767).astype(np.int16) / np.float32(32768))
    yield from made.flush()


async def run(engine: ScriptedEngine, frames: int, **asked: object) -> tuple[TranscriptionJob, list[str]]:
    job = TranscriptionJob(engine, KNOWN, Frames(frames), Asked(**asked))  # pyright: ignore[reportArgumentType]
    texts = [text async for text in job.run()]
    assert "".join(texts) == job.text
    return job, texts


def one_segment(_: list[int], __: Draw, piece: Piece) -> Sequence[int]:
    return [STAMP, 5, 6, STAMP + piece.frames // 2]


def doubted(*logprobs: float) -> Script:
    """Readings whose tokens have these logprobs, one for each try."""
    left = list(logprobs)

    def script(_: list[int], __: Draw, ___: Piece) -> Sequence[Drawn]:
        value = left.pop(0)
        return [Drawn(token, value) for token in (STAMP, 5, STAMP + 10)]

    return script


async def test_language_and_prompt_stand_before_the_text() -> None:
    engine = ScriptedEngine(one_segment, language=111)
    job, texts = await run(engine, 200, prompt=(7, 8), task="translate")
    assert engine.prompts == [[103, 7, 8, 101, 111, 113]]
    assert (job.language, job.text, texts) == ("de", "f5 g6", ["f5 g6"])
    [segment] = job.segments
    assert (segment.start, segment.end, segment.seek, segment.temperature) == (0.0, 2.0, 0, 0.0)
    assert segment.no_speech_prob == pytest.approx(0.1)
    assert engine.draws[0].max_tokens == 448 - 6


async def test_doubted_readings_climb_until_one_is_good() -> None:
    engine = ScriptedEngine(doubted(-3.0, -2.0, -0.5))
    job, _ = await run(engine, 200, language="en")
    assert [how.temperature for how in engine.draws] == [0.0, 0.2, 0.4]
    assert (job.counts.retries, job.segments[0].temperature) == (2, 0.4)
    assert len({how.seed for how in engine.draws}) == 3


async def test_the_last_reading_is_kept_though_all_fail() -> None:
    engine = ScriptedEngine(doubted(*[-3.0] * 6))
    job, _ = await run(engine, 200)
    assert [how.temperature for how in engine.draws] == list(LADDER)
    assert job.segments[0].temperature == 1.0


async def test_what_repeats_itself_is_tried_again() -> None:
    def script(_: list[int], how: Draw, __: Piece) -> Sequence[int]:
        return [STAMP, *([5] * (200 if how.temperature < 0.2 else 2)), STAMP + 10]

    engine = ScriptedEngine(script)
    job, _ = await run(engine, 200)
    assert job.segments[0].temperature == 0.2


async def test_silence_is_left_out_at_the_first_try() -> None:
    engine = ScriptedEngine(doubted(-3.0), no_speech=0.9)
    job, texts = await run(engine, 200)
    assert (job.segments, texts, len(engine.draws)) == ([], [], 1)


async def test_what_has_no_sound_at_all_reaches_no_model() -> None:
    """A model that is sure of words in silence is not asked, whatever the length."""
    engine = ScriptedEngine(one_segment)
    for frames in range(1, 9000, 90):
        job = TranscriptionJob(engine, KNOWN, Frames(frames, [NO_SOUND] * frames), Asked())
        assert [text async for text in job.run()] == [] and (job.segments, job.language) == ([], "en")
    assert not engine.draws and not engine.probes


async def test_recordings_and_what_is_mute_in_them_are_told_apart() -> None:
    """The sound of a written file: silence, a quiet tone of 0.1 s, silence."""
    rows = [*decoded(np.concatenate([silence(31.0), tone(0.1, level=0.001), silence(64.0)]))]
    levels = np.concatenate(rows).mean(1).tolist()
    engine = ScriptedEngine(one_segment, language=111)
    job = TranscriptionJob(engine, KNOWN, Frames(len(levels), levels), Asked())
    assert [text async for text in job.run()] == ["f5 g6"]
    assert (job.language, [piece.first for piece in engine.pieces]) == ("de", [3000])


@pytest.mark.parametrize("cuts", [False, True])
async def test_two_hours_lose_nothing(cuts: bool) -> None:
    frames, read = 720_000, list[tuple[int, int]]()

    def script(_: list[int], __: Draw, piece: Piece) -> Sequence[int]:
        end = min(1400 + piece.first % 90, piece.frames // 2)
        whole = 2 * end >= piece.frames - 1
        read.append((piece.first, piece.first + (piece.frames if whole else 2 * end)))
        return [STAMP, 5, STAMP + end, *(() if whole else (STAMP + end, 6))]

    levels = np.random.default_rng(1).standard_normal(frames).tolist()
    asked = Asked(language="en", silence=Silence() if cuts else None)
    job = TranscriptionJob(ScriptedEngine(script), KNOWN, Frames(frames, levels), asked)
    assert len("".join([text async for text in job.run()]).split()) == len(read) >= 240
    read.sort()
    assert read[0][0] == 0 and read[-1][1] == frames
    assert all(start == end for (_, end), (start, _) in pairwise(read))


async def test_a_given_temperature_is_used_once_and_told_token_by_token() -> None:
    engine = ScriptedEngine(doubted(-3.0))
    job, texts = await run(engine, 200, temperatures=(0.7,))
    assert (len(engine.draws), texts, job.counts.retries) == (1, ["f5"], 0)
    engine = ScriptedEngine(one_segment)
    assert (await run(engine, 200, temperatures=(0.0,)))[1] == ["f5", " g6"]


async def test_the_text_so_far_is_handed_on_if_asked_for() -> None:
    engine = ScriptedEngine(one_segment)
    await run(engine, 3100, conditions=True, prompt=(9,), language="en")
    assert engine.prompts[1] == [103, 9, STAMP, 5, 6, STAMP + 1500, 101, 110, 112]
    engine = ScriptedEngine(one_segment)
    await run(engine, 3100, language="en")
    assert engine.prompts[1] == [101, 110, 112]
    warm = ScriptedEngine(doubted(-3.0, -3.0, -3.0, -0.1, -0.1))
    await run(warm, 3100, conditions=True, language="en")
    assert warm.prompts[-1] == [101, 110, 112]


async def test_words_have_times_of_their_own() -> None:
    def script(_: list[int], __: Draw, piece: Piece) -> Sequence[int]:
        return [STAMP, 5, 6, STAMP + 50, STAMP + 50, 7, STAMP + 100]

    job, _ = await run(ScriptedEngine(script), 200, words=True, language="en")
    found = [(word.word, word.start, word.end) for segment in job.segments for word in segment.words]
    assert found == [("f5", 0.0, 0.1), ("g6", 0.1, 0.2), ("h7", 0.2, 0.3)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 1500), st.booleans(), st.integers(0, 9))
async def test_no_frame_is_lost(frames: int, closes: int, cuts: bool, seed: int) -> None:
    """A model that closes segments early, and says more behind them, reads all of it in either way."""
    covered = np.zeros(frames, bool)

    def script(_: list[int], __: Draw, piece: Piece) -> Sequence[int]:
        end = min(closes, piece.frames // 2)
        whole = 2 * end >= piece.frames - 1
        covered[piece.first : piece.first + (piece.frames if whole or not end else 2 * end)] = True
        return [STAMP, 5, STAMP + end, *(() if whole else (STAMP + end, 6))]

    levels = np.random.default_rng(seed).standard_normal(frames).tolist()
    silence = Silence() if cuts else None
    engine = ScriptedEngine(script)
    job = TranscriptionJob(engine, KNOWN, Frames(frames, levels), Asked(language="en", silence=silence))
    assert "".join([text async for text in job.run()]) == job.text
    assert covered.all()
    starts = [segment.start for segment in job.segments]
    assert starts == sorted(starts)


def test_cuts_are_in_silence_and_leave_nothing_out() -> None:
    levels = np.ones(7000, np.float32)
    levels[2500:2600] = levels[5000:5030] = 0.0
    parts = cut_at_silence(levels, 7000, Silence())
    assert [first for first, _ in parts[1:]] == [end for _, end in parts[:-1]]
    assert (parts[0][0], parts[-1][1]) == (0, 7000)
    assert all(0 < end - first <= 3000 for first, end in parts)
    assert 2500 <= parts[0][1] <= 2600
    assert 5000 <= parts[1][1] <= 5030
