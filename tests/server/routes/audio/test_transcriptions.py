"""Transcriptions over HTTP with a scripted model: forms, formats, streams and refusals."""

import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from fake_api import make_app, make_client, refusal
from fake_frontend import FakeFrontend
from full_disk import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import noise, written
from speech_frontend import FakeTranscriber, let_transcribe, says

from server.schemas.audio.form import form_fields
from server.speech.temperature_fallback import LADDER

PATH, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
SOUND = written(noise(2.0), "flac")


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
def transcriber(frontend: FakeFrontend) -> FakeTranscriber:
    return let_transcribe(frontend, says(" Hello you."))


@pytest.fixture
async def client(frontend: FakeFrontend, transcriber: FakeTranscriber) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(make_app(frontend)) as client:
        yield client
    assert (transcriber.open, frontend.live) == (0, 0)


async def send(client: httpx.AsyncClient, path: str = PATH, file: bytes = SOUND, **fields: Any) -> Any:
    return await client.post(path, files={"file": ("a.bin", file)}, data=fields)


async def refused(client: httpx.AsyncClient, status: int = 400, **fields: Any) -> str:
    answer = await send(client, **fields)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


async def test_formats(client: httpx.AsyncClient) -> None:
    usage = {"type": "duration", "seconds": 2}
    assert (await send(client)).json() == {"text": "Hello you.", "usage": usage}
    plain = await send(client, response_format="text", model="tiny")
    assert (plain.text, plain.headers["content-type"]) == ("Hello you.\n", "text/plain; charset=utf-8")
    srt = await send(client, response_format="srt")
    assert srt.text == "1\n00:00:00,000 --> 00:00:02,000\nHello you.\n\n"
    vtt = await send(client, response_format="vtt")
    assert vtt.text == "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nHello you.\n\n"
    verbose = (await send(client, response_format="verbose_json", language="German")).json()
    [segment] = verbose.pop("segments")
    assert verbose == {
        "task": "transcribe",
        "language": "german",
        "duration": 2.0,
        "text": "Hello you.",
        "usage": usage,
    }
    assert (segment["id"], segment["seek"], segment["start"], segment["end"]) == (0, 0, 0.0, 2.0)
    assert (segment["text"], segment["temperature"]) == (" Hello you.", 0.0)
    assert segment["avg_logprob"] == pytest.approx(-0.1) and segment["no_speech_prob"] == pytest.approx(0.1)
    assert 0 < segment["compression_ratio"] < 2.4 and len(segment["tokens"]) == 13


async def test_words_and_logprobs(client: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {"timestamp_granularities[]": ["word"], "response_format": "verbose_json"}
    answer = (await send(client, **fields)).json()
    assert "segments" not in answer
    assert answer["words"] == [
        {"word": "Hello", "start": 0.0, "end": 0.6},
        {"word": "you.", "start": 0.6, "end": 1.1},
    ]
    asked: dict[str, Any] = {"include[]": "logprobs"}
    told = (await send(client, **asked)).json()["logprobs"]
    assert "".join(each["token"] for each in told) == " Hello you." and told[0]["logprob"] == -0.1


async def test_a_stream_is_read_by_clients_of_either_form(client: httpx.AsyncClient) -> None:
    answer = await send(client, stream="true", stream_include_usage="true", temperature="0.3")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert [event["type"].rpartition(".")[2] for event in events].count("done") == 1
    *deltas, done = events
    assert done["type"] == "transcript.text.done" and done["usage"]["type"] == "tokens"
    assert done["choices"] == [] and done["usage"]["prompt_tokens"] == 3
    assert "".join(event["delta"] for event in deltas) == done["text"] == "Hello you."
    contents = [event["choices"][0]["delta"]["content"] for event in deltas]
    assert "".join(contents) == "Hello you." and len(deltas) > 5
    assert deltas[-1]["choices"][0]["finish_reason"] == "stop" and "usage" not in deltas[-1]
    assert {event["id"] for event in deltas} == {deltas[0]["id"]} and deltas[0]["id"].startswith("trsc-")


async def test_each_event_of_a_stream_has_a_choice_unless_usage_is_told(frontend: FakeFrontend) -> None:
    let_transcribe(frontend, says(" Hello you."))
    for forced in (False, True):
        async with make_client(make_app(frontend, enable_force_include_usage=forced)) as client:
            answer = await send(client, stream="true")
        *events, done = [json.loads(line) for line in answer.text.split("data: ")[1:-1]]
        told = [] if forced else [done]
        assert "".join(each["choices"][0]["delta"]["content"] for each in [*events, *told]) == "Hello you."
        assert bool(done["choices"]) is not forced and done["usage"]["completion_tokens"] > 0


async def test_fields_reach_the_transcription(
    client: httpx.AsyncClient, frontend: FakeFrontend, transcriber: FakeTranscriber
) -> None:
    await send(client, TRANSLATIONS, prompt="Ann", seed="7", condition_on_prev_tokens="true", top_p="0.5")
    strategy: dict[str, Any] = {
        "chunking_strategy[type]": "server_vad",
        "chunking_strategy[threshold]": "0.3",
    }
    await send(client, temperature="0.4", logprob_threshold="-2", max_completion_tokens="9", **strategy)
    await send(client, chunking_strategy="auto", language="en", max_completion_tokens="1000000")
    first, second, third = transcriber.asked
    assert (first.task, first.prompt, first.draw.seed) == ("translate", tuple(b" Ann"), 7)
    assert (first.temperatures, first.conditions, first.draw.top_p) == (LADDER, True, 0.5)
    assert (second.temperatures, second.thresholds.logprob, second.draw.max_tokens) == ((0.4,), -2.0, 9)
    assert second.silence is not None and second.silence.threshold == 0.3
    assert (third.language, third.silence is not None, second.language) == ("en", True, None)
    assert third.draw.max_tokens == frontend.facts.max_model_len


@pytest.mark.parametrize(
    ("fields", "words"),
    (
        ({"response_format": "diarized_json"}, "tells speakers apart"),
        ({"response_format": "xml"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "needs response_format=verbose_json"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, "'word' or 'segment'"),
        ({"stream": "true", "response_format": "srt"}, "stream needs"),
        ({"language": "klingon"}, "it has de, en"),
        ({"temprature": "1"}, "did you mean `temperature`"),
        ({"hotwords": "Ann"}, "`hotwords` is not supported"),
        ({"known_speaker_names[]": "Ann"}, "`known_speaker_names` is not supported"),
        ({"top_p": "7"}, "top_p must be in"),
        ({"chunking_strategy": "{"}, "an object in JSON"),
        ({"chunking_strategy": "auto", "condition_on_prev_tokens": "true"}, "give one of them"),
    ),
)
async def test_wrong_fields_are_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], words: str
) -> None:
    assert words in await refused(client, **fields)


async def test_wrong_files_are_refused(client: httpx.AsyncClient, transcriber: FakeTranscriber) -> None:
    assert "recording must be one of" in await refused(client, file=b"/etc/passwd")
    assert "is empty" in await refused(client, file=b"")
    assert "at most 90 seconds" in await refused(client, file=written(noise(91.0), "opus"))
    transcriber.most_bytes = 1000
    assert "--max-audio-mb" in await refused(client, 413)
    assert "does not exist" in await refused(client, 404, file=b"x", model="other")


async def test_a_full_folder_for_temporary_files_is_told(
    client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with full_disk(tmp_path):
        assert "temporary files is full" in await refused(client, 507)
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_for_temporary_files_that_is_missing_is_told(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_none(prefix: str) -> tuple[int, str]:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkstemp", find_none)
    assert "temporary files is full" in await refused(client, 507)


async def test_forms_in_any_order(client: httpx.AsyncClient) -> None:
    def part(name: str, value: bytes, more: str = "") -> bytes:
        head = f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
        return head.encode() + value + b"\r\n"

    head = {"content-type": "multipart/form-data; boundary=b"}
    file, format = part("file", SOUND), part("response_format", b"text")
    answer = await client.post(PATH, content=file + format + b"--b--\r\n", headers=head)
    assert answer.text == "Hello you.\n"
    twice = await client.post(PATH, content=file + file + b"--b--\r\n", headers=head)
    assert (twice.status_code, "several files" in twice.text) == (400, True)
    same = await client.post(PATH, content=file + format + format + b"--b--\r\n", headers=head)
    assert (same.status_code, "twice" in same.text) == (400, True)
    broken = await client.post(PATH, content=file, headers=head)
    assert (broken.status_code, "ends before" in broken.text) == (400, True)
    none = await client.post(PATH, json={"file": "a"})
    assert none.status_code == 415


async def test_other_models_and_other_routes_name_what_they_do(frontend: FakeFrontend) -> None:
    async with make_client(make_app(frontend)) as client:
        assert "/v1/completions" in await refused(client)
        let_transcribe(frontend, says("a"))
        messages = [{"role": "user", "content": "a"}]
        error = await refusal(client, "/v1/chat/completions", messages=messages)
        assert "/v1/audio/transcriptions" in error["message"]
        assert (await client.get("/v1/models")).json()["data"][0]["tasks"] == ["transcription"]


async def test_openais_client_reads_every_form(frontend: FakeFrontend, transcriber: FakeTranscriber) -> None:
    transport = httpx2.ASGITransport(make_app(frontend))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        client = openai.AsyncOpenAI(api_key="none", base_url="http://localhost/v1", http_client=http)
        create = client.audio.transcriptions.create
        file = ("a.flac", SOUND)
        assert (await create(file=file, model="tiny")).text == "Hello you."
        assert await create(file=file, model="tiny", response_format="text") == "Hello you.\n"
        verbose = await create(
            file=file,
            model="tiny",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert verbose.words and verbose.segments and verbose.segments[0].end == 2.0
        vad: Any = {"type": "server_vad", "threshold": 0.2}
        assert (await create(file=file, model="tiny", chunking_strategy=vad)).text == "Hello you."
        stream = await create(file=file, model="tiny", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "transcript.text.done" and events[-1].text == "Hello you."
        with pytest.warns(DeprecationWarning):
            assert (await client.audio.translations.create(file=file, model="tiny")).text == "Hello you."
    assert transcriber.open == 0


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["include[]", "a[b]", "chunking_strategy", "a"]), st.text())))
def test_any_form_is_read_or_refused(pairs: list[tuple[str, str]]) -> None:
    try:
        assert isinstance(form_fields(pairs), dict)
    except Exception as error:
        assert getattr(error, "status", 0) == 400


async def test_metrics_count_seconds_and_pieces(frontend: FakeFrontend, transcriber: FakeTranscriber) -> None:
    async with make_client(make_app(frontend)) as client:
        await send(client)
        page = (await client.get("/metrics")).text
        assert "facet:audio_seconds" in page and "facet:audio_real_time_factor" in page
