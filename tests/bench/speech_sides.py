"""One side of tests/bench/speech.py, in a process of its own, which may be of another environment.

It reads a JSON list [how many recordings at once, tokens of each] from each line of its input, transcribes
noise of 30 s, and answers with the seconds that it took and the tokens of each text: a word is one, and so is
the time with which the texts of all but whisper.cpp begin.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Side = Callable[[list[Any], int], list[str]]
_THREADS = os.cpu_count() or 1


def facet(folder: str, kind: str) -> Side:
    from msgspec.structs import replace

    from facet import LLM
    from server.offline import transcribing
    from server.speech.asked import Asked
    from server.speech.quality import Thresholds

    options: dict[str, Any] = {"dtype": kind} if kind in ("float32", "bfloat16") else {"quantization": kind}
    llm = LLM(folder, **options)
    plain = transcribing._asked  # pyright: ignore[reportPrivateUsage]

    def transcribe(sounds: list[Any], tokens: int) -> list[str]:
        def bounded(*given: Any) -> Asked:
            asked = plain(*given)
            draw = replace(asked.draw, max_tokens=tokens)
            every = Thresholds(1e9, -1e9, 2.0)  # which each reading passes
            return replace(asked, draw=draw, temperatures=(0.0,), thresholds=every)

        transcribing._asked = bounded  # pyright: ignore[reportPrivateUsage]
        return [each.text for each in llm.transcribe(sounds, language="en")]

    return transcribe


def faster_whisper(folder: str, kind: str) -> Side:
    from faster_whisper import WhisperModel  # pyright: ignore[reportMissingImports]

    model = WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=_THREADS)

    def one(sound: Any, tokens: int) -> str:
        segments, _ = model.transcribe(
            sound,
            language="en",
            beam_size=1,
            best_of=1,
            temperature=0.0,
            compression_ratio_threshold=None,
            log_prob_threshold=None,
            no_speech_threshold=None,
            condition_on_previous_text=False,
            suppress_tokens=[],
            suppress_blank=False,
            max_new_tokens=2 * tokens - 1,  # its engine bounds prompt and text by half of what it is given
        )
        return "".join(segment.text for segment in segments)

    def transcribe(sounds: list[Any], tokens: int) -> list[str]:
        return [one(sound, tokens) for sound in sounds]

    return transcribe


def whisper_cpp(path: str, kind: str) -> Side:
    from pywhispercpp.model import Model  # pyright: ignore[reportMissingImports]

    model = Model(
        path, n_threads=_THREADS, print_progress=False, print_realtime=False, redirect_whispercpp_logs_to=None
    )

    def one(sound: Any, tokens: int) -> str:
        found = model.transcribe(
            sound,
            language="en",
            greedy={"best_of": 1},
            temperature=0.0,
            temperature_inc=0.0,
            single_segment=True,
            no_context=True,
            suppress_blank=False,
            max_tokens=tokens - 1,  # one more is written than it is told
        )
        return "".join(each.text for each in found)

    return lambda sounds, tokens: [one(sound, tokens) for sound in sounds]


SIDES = {"facet": facet, "faster-whisper": faster_whisper, "whisper.cpp": whisper_cpp}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    name, path, kind = sys.argv[1:]
    transcribe = SIDES[name](path, kind)
    for number, line in enumerate(sys.stdin):
        count, tokens = json.loads(line)
        dice = np.random.default_rng(number)  # other recordings each time: none is known already
        sounds = [(0.1 * dice.standard_normal(480_000)).astype(np.float32) for _ in range(count)]
        began = time.perf_counter()
        texts = transcribe(sounds, tokens)
        seconds = time.perf_counter() - began
        written = [len(text.split()) + (name != "whisper.cpp") for text in texts]
        print(json.dumps([seconds, written]), file=answers, flush=True)


if __name__ == "__main__":
    main()
