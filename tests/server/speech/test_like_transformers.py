"""Long transcriptions with transformers' own model against its own `generate`: the same tokens and times."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_whisper
from sounds import noise, silence, tone
from speech_engines import ScriptedEngine
from whole_recordings import log_mel

from server.speech.speech_model import Draw, Drawn, Piece
from server.speech.temperature_fallback import Thresholds
from server.speech.transcribe import TranscriptionJob
from server.speech.transcription import Asked
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


class TransformersEngine(ScriptedEngine):
    """Draws greedily with transformers' model, bound by its own rules of timestamps."""

    def __init__(self, model: Any, features: np.ndarray) -> None:
        super().__init__(lambda *_: ())
        self._model, self._features = model, features

    async def draw(self, prompt: list[int], how: Draw, piece: Piece) -> AsyncGenerator[list[Drawn], None]:
        import torch

        padded = np.zeros((len(self._features), 3000), np.float32)
        rows = self._features[:, piece.first : piece.first + 3000]
        padded[:, : rows.shape[1]] = rows
        encoded = self._model.model.encoder(torch.from_numpy(padded)[None]).last_hidden_state
        ids, bounds = list(prompt), rules(self._model, len(prompt))
        for _ in range(how.max_tokens):
            known = torch.tensor([ids])
            with torch.no_grad():
                scores = self._model(encoder_outputs=(encoded,), decoder_input_ids=known).logits[:, -1]
            told = tuple(float(torch.log_softmax(scores, -1)[0, id]) for id in how.told)
            if how.only:
                mask = torch.full_like(scores, -torch.inf)
                mask[:, list(how.only)] = 0
                scores = scores + mask
            else:
                for bound in bounds:
                    scores = bound(known, scores)
            token = int(scores.argmax())
            yield [Drawn(token, float(torch.log_softmax(scores, -1)[0, token]), told)]
            ids.append(token)
            if token == self._model.generation_config.eos_token_id:
                return


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
    engine = TransformersEngine(model, recording.features)
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
