"""A real server with a tiny Moonshine: texts are those of transformers, of long recordings piece by piece."""

from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny_moonshine
from live import serving
from sounds import noise, silence, tone, written
from tokenizers import Tokenizer

from facet import LLM
from server.errors import BadRequest
from server.media.audio.recordings import write_features
from server.speech.silence import Silence, cut_at_silence

pytestmark = pytest.mark.slow(3)

LONG = np.concatenate([noise(18.0), silence(1.0), tone(9.0), noise(8.0, seed=1)])
GREEDY = {"compression_ratio_threshold": "1e9", "logprob_threshold": "-1e9"}


def expected(folder: Path, model: Any, samples: np.ndarray) -> str:
    """The texts that transformers finds, whose pieces are cut at silence."""
    import torch

    heard = (samples * 32767).astype(np.int16) / np.float32(32768)
    found = write_features([heard], 0, BytesIO())
    parts = cut_at_silence(np.frombuffer(found.levels, np.float32), found.frames, Silence())
    tokenizer, texts = Tokenizer.from_file(str(folder / "tokenizer.json")), list[str]()
    for first, end in parts:
        piece = torch.from_numpy(heard[first * 160 : end * 160])[None]
        most = min(194, int(np.ceil((end - first) * 0.065)) + 1)
        ids = model.generate(piece, max_length=most, do_sample=False)[0].tolist()
        texts.append(tokenizer.decode(ids))
    assert len(parts) == 1 + (len(samples) > 30 * 16_000)
    return " ".join(text for text in texts if text).strip()


def test_recordings_are_written_by_http_and_by_programs(tmp_path: Path) -> None:
    model = tiny_moonshine.make(tmp_path)
    sounds = [noise(3.0), LONG]
    right = [expected(tmp_path, model, each) for each in sounds]
    assert all(right)
    with serving(str(tmp_path), "--dtype", "float32") as server:

        def send(samples: np.ndarray, path: str = "transcriptions", **fields: str) -> httpx.Response:
            files, data = {"file": ("a.wav", written(samples))}, {**GREEDY, **fields}
            return httpx.post(f"{server.url}/v1/audio/{path}", data=data, files=files, timeout=120)

        for sound, text in zip(sounds, right, strict=True):
            assert send(sound).json()["text"].strip() == text
        streamed = send(LONG, stream="true", temperature="0.1").text
        assert streamed.count("transcript.text.done") == 1 and "data: [DONE]" in streamed
        assert send(silence(2.0)).json()["text"] == ""
        for path, fields, words in (
            ("transcriptions", {"response_format": "srt"}, "has times, which this model does not tell"),
            ("transcriptions", {"response_format": "verbose_json"}, "has times"),
            ("transcriptions", {"language": "en"}, "nothing but a recording in its own language"),
            ("transcriptions", {"prompt": "gulls"}, "prompt: this model takes nothing"),
            ("translations", {}, "translates nothing"),
        ):
            refused = send(sounds[0], path, **fields)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    with LLM(str(tmp_path), dtype="float32") as llm:
        [told] = llm.transcribe((sounds[0] * 32767).astype(np.int16) / np.float32(32768))
        assert told.language == "" and told.duration == 3.0 and len(told.segments) <= 1
        with pytest.raises(BadRequest, match="leave out language"):
            llm.transcribe(sounds[0], language="en")
        with pytest.raises(BadRequest, match="no times of words"):
            llm.transcribe(sounds[0], word_timestamps=True)
