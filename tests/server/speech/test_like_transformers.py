"""Long transcriptions with transformers' own model against its own `generate`: the same tokens and times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_whisper
from sounds import noise, silence, tone
from speech_engines import TransformersEngine
from whole_recordings import log_mel

from server.speech.transcribe import TranscriptionJob
from server.speech.transcription import Asked, Thresholds
from server.speech.vocabulary import SpeechTokens, read_tokens

pytestmark = pytest.mark.slow(3)

ALL_GOOD = Thresholds(compression_ratio=1e9, logprob=-1e9, no_speech=2.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, SpeechTokens]:
    folder: Path = tmp_path_factory.mktemp("whisper")
    return tiny_whisper.make(folder), read_tokens(folder)


class Rows:
    def __init__(self, samples: np.ndarray) -> None:
        rows = np.concatenate(list(log_mel([samples], 80)))
        self.features = (np.maximum(rows, rows.max() - 8).T + 4) / 4
        self.frames, self.levels = len(rows), rows.mean(1)


def rules(model: Any, begin: int) -> Sequence[Any]:
    from transformers import LogitsProcessorList
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    config = model.generation_config
    stamps = WhisperTimeStampLogitsProcessor(config, begin_index=begin)
    first = SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin_index=begin)
    return LogitsProcessorList([SuppressTokensLogitsProcessor(config.suppress_tokens), first, stamps])


LONG = np.concatenate([noise(20.0), silence(4.0), tone(11.0), noise(27.0, seed=1)])


@pytest.mark.parametrize("conditions", (False, True))
@pytest.mark.parametrize("samples", (noise(30.0), LONG), ids=("short", "long"))
async def test_segments_are_those_of_transformers(
    checkpoint: tuple[Any, SpeechTokens], samples: np.ndarray, conditions: bool
) -> None:
    import torch

    model, known = checkpoint
    recording = Rows(samples)
    features = torch.from_numpy(recording.features)[None]
    wanted = model.generate(
        features,
        attention_mask=torch.ones(1, recording.frames, dtype=torch.long),
        return_timestamps=True,
        return_segments=True,
        language="de",
        task="translate",
        condition_on_prev_tokens=conditions,
        prompt_ids=torch.tensor([known.previous, 72, 105]),
    )["segments"][0]
    engine = TransformersEngine(model, recording.features, lambda begin: rules(model, begin))
    asked = Asked(
        language="de", task="translate", prompt=(72, 105), conditions=conditions, thresholds=ALL_GOOD
    )
    job = TranscriptionJob(engine, known, recording, asked)
    text = "".join([text async for text in job.run()])
    assert text == job.text
    said = [one for one in wanted if any(one["tokens"] < 256)]
    assert [one.start for one in job.segments] == pytest.approx([float(one["start"]) for one in said])
    assert [one.end for one in job.segments] == pytest.approx([float(one["end"]) for one in said])
    tokens = [[token for token in one.tokens if known.is_text(token)] for one in job.segments]
    assert tokens == [[int(token) for token in one["tokens"] if token < 256] for one in said]
    assert len(said) > 1
