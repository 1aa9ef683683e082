"""A real server with a tiny Whisper: texts and times are those of transformers, alone and beside others."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
import tiny_whisper
from live import LiveServer, serving
from sounds import noise, silence, tone, written
from whole_recordings import log_mel

pytestmark = pytest.mark.turns(4)

PATH = "/v1/audio/transcriptions"
GREEDY = {"compression_ratio_threshold": "1e9", "logprob_threshold": "-1e9", "no_speech_threshold": "2"}
"""Thresholds that every reading passes."""
LONG = np.concatenate([noise(21.0), silence(3.0), tone(17.0), noise(9.0, seed=1)])


class Served(NamedTuple):
    server: LiveServer
    model: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("whisper")
    model = tiny_whisper.make(folder)
    with serving(str(folder), "--dtype", "float32", "--max-audio-seconds", "60") as server:
        yield Served(server, model)


def ask(server: LiveServer, samples: np.ndarray, **fields: Any) -> Any:
    form = {"response_format": "verbose_json", "language": "de", **GREEDY, **fields}
    files = {"file": ("a.wav", written(samples))}
    answer = httpx.post(f"{server.url}{PATH}", data=form, files=files, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(model: Any, samples: np.ndarray) -> list[tuple[float, float, str]]:
    """The segments that transformers finds."""
    import torch

    heard = (samples * 32767).astype(np.int16) / np.float32(32768)
    rows = np.concatenate(list(log_mel([heard], 80)))
    features = torch.from_numpy((np.maximum(rows, rows.max() - 8).T + 4) / 4)[None]
    found = model.generate(
        features,
        attention_mask=torch.ones(1, len(rows), dtype=torch.long),
        return_timestamps=True,
        return_segments=True,
        language="de",
        task="transcribe",
    )["segments"][0]
    texts = [bytes(int(token) for token in one["tokens"] if token < 256) for one in found]
    return [
        (float(one["start"]), float(one["end"]), text.hex())
        for one, text in zip(found, texts, strict=True)
        if text
    ]


def told(answer: Any) -> list[tuple[float, float, str]]:
    return [
        (each["start"], each["end"], bytes(token for token in each["tokens"] if token < 256).hex())
        for each in answer["segments"]
    ]


def test_segments_are_those_of_transformers(served: Served) -> None:
    answer = ask(served.server, LONG)
    wanted = expected(served.model, LONG)
    assert [text for *_, text in told(answer)] == [text for *_, text in wanted]
    assert [start for start, *_ in told(answer)] == pytest.approx([start for start, *_ in wanted], abs=0.006)
    assert answer["language"] == "german" and answer["duration"] == 50.0


def test_recordings_beside_each_other_give_the_same(served: Served) -> None:
    sounds = [noise(30.0, seed=seed) for seed in range(3)]
    alone = [ask(served.server, each) for each in sounds]
    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(lambda each: ask(served.server, each), [*sounds, *sounds])] == [*alone, *alone]


def test_words_have_times_within_their_segments(served: Served) -> None:
    granularities = {"timestamp_granularities[]": ["word", "segment"]}
    answer, plain = (ask(served.server, LONG, **given) for given in (granularities, {}))
    assert answer["segments"] == plain["segments"] and "words" not in plain
    words = answer["words"]
    starts = [word["start"] for word in words]
    assert starts == sorted(starts) and all(word["start"] <= word["end"] <= 50 for word in words)
    said = "".join(segment["text"] for segment in answer["segments"])
    assert "".join("".join(word["word"] for word in words).split()) == "".join(said.split())
    only = ask(served.server, LONG, **{"timestamp_granularities[]": "word"})
    assert only["words"] == words and "segments" not in only


def test_openais_client(served: Served) -> None:
    with openai.OpenAI(api_key="none", base_url=f"{served.server.url}/v1") as client:
        create = client.audio.transcriptions.create
        for name in ("m4a", "webm", "opus", "mp3", "flac"):
            answer = create(file=(name, written(noise(2.0), name)), model="", temperature=0.5)
            assert isinstance(answer.text, str)
        events: list[Any] = [
            *create(file=("a.wav", written(LONG)), model="", stream=True, temperature=0.2, language="en")
        ]
        assert events[-1].type == "transcript.text.done"
        assert "".join(event.delta for event in events[:-1]) == events[-1].text
        with pytest.raises(openai.BadRequestError, match="audio/transcriptions"):
            client.chat.completions.create(model="", messages=[{"role": "user", "content": "a"}])


def test_a_hostile_file_harms_nobody(served: Served) -> None:
    before = ask(served.server, noise(2.0))
    url = f"{served.server.url}{PATH}"
    bomb, cut = written(silence(600.0), "flac"), written(noise(3.0), "m4a")[:9000]
    for file in (b"#EXTM3U\nhttp://localhost/a", bomb, cut):
        assert httpx.post(url, files={"file": file}, timeout=60).status_code == 400
        assert ask(served.server, noise(2.0)) == before
