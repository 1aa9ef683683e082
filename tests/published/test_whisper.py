"""Published Whispers in the format of CTranslate2 write what transformers writes with the same weights."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import published
import pytest
import torch

from facet import LLM

RATE = 16_000
_RETRIEVAL, _UTF8 = 1, 1
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def say(*sentences: str, voice: str = "en-us") -> list[np.ndarray]:
    """Each sentence as samples of 16 kHz in [-1, 1]. Skips the test where the package is absent."""
    loader: Any = pytest.importorskip("espeakng_loader", reason="espeakng-loader is absent")
    library = ctypes.CDLL(loader.get_library_path())
    heard: list[np.ndarray] = []

    def keep(samples: Any, count: int, _events: object) -> int:
        if samples and count:
            heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    callback = _Callback(keep)
    rate = library.espeak_Initialize(_RETRIEVAL, 0, loader.get_data_path().encode(), 0)
    assert rate > 0, "espeak-ng has not found its data"
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(voice.encode())
    said: list[np.ndarray] = []
    for sentence in sentences:
        heard.clear()
        text = sentence.encode() + b"\0"
        library.espeak_Synth(text, len(text), 0, 0, 0, _UTF8, None, None)
        library.espeak_Synchronize()
        samples = np.concatenate(heard) / 32_768
        at = np.arange(0, len(samples) - 1, rate / RATE)
        said.append(np.interp(at, np.arange(len(samples)), samples).astype(np.float32))
    library.espeak_Terminate()
    return said


SENTENCES = (
    "The capital of France is Paris.",
    "Please open the window, it is warm in here.",
    "My train leaves at a quarter past seven tomorrow.",
    "He bought three apples and two pears.",
    "The weather will be cold and windy on Sunday.",
    "She has been working at the hospital for ten years.",
    "Could you tell me the way to the station?",
    "The cat is sleeping under the table.",
    "We will meet again next week in London.",
    "I would like a cup of coffee with milk.",
)
_NUMBERS = {"7": "seven", "3": "three", "2": "two", "10": "ten"}


class Speech(NamedTuple):
    folder: Path
    llm: LLM
    sounds: list[np.ndarray]


@pytest.fixture(scope="module", params=("tiny.en", "base"))
def speech(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speech]:
    is_base = request.param == "base"
    folder = (
        published.whisper_base(tmp_path_factory.mktemp("base"))
        if is_base
        else published.short_named("whisper-tiny.en")
    )
    sounds = say(*SENTENCES)
    with LLM(str(folder), dtype="float32") as llm:
        yield Speech(folder, llm, sounds)


def test_transcripts_are_those_of_transformers_and_what_was_said(speech: Speech, tmp_path: Path) -> None:
    model, features, tokenizer = published.transformers_whisper(speech.folder, tmp_path)
    language = {"language": "en", "task": "transcribe"} if model.generation_config.is_multilingual else {}
    rows = features(speech.sounds, sampling_rate=RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        expected = model.generate(rows, return_timestamps=True, do_sample=False, **language)
    texts = [tokenizer.decode(each, skip_special_tokens=True).strip() for each in expected]
    found = [each.text for each in speech.llm.transcribe(speech.sounds, language="en", temperature=0.0)]
    assert found == [re.sub(r"<\|[\d.]+\|>", "", text).strip() for text in texts]
    assert word_errors(found, SENTENCES) < 0.12


def test_words_have_times_in_order_within_the_sound(speech: Speech) -> None:
    for found in speech.llm.transcribe(speech.sounds, language="en", temperature=0.0, word_timestamps=True):
        times = [
            time for segment in found.segments for word in segment.words for time in (word.start, word.end)
        ]
        assert (
            len(times) >= 10
            and times == sorted(times)
            and times[0] >= 0
            and times[-1] <= found.duration + 0.1
        )


def word_errors(found: Sequence[str], said: Sequence[str]) -> float:
    """The share of words that differ, by the fewest changes of words."""
    wrong = sum(distance(words(one), words(other)) for one, other in zip(found, said, strict=True))
    return wrong / sum(len(words(each)) for each in said)


def words(text: str) -> list[str]:
    found: list[str] = re.findall(r"\w+", text.lower())
    return [_NUMBERS.get(word, word) for word in found]


def distance(one: Sequence[str], other: Sequence[str]) -> int:
    row = list(range(len(other) + 1))
    for at, word in enumerate(one, 1):
        left, row[0] = row[0], at
        for column, heard in enumerate(other, 1):
            left, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, left + (word != heard))
    return row[-1]
