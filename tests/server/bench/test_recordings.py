"""Recordings as a load sends them: noise and files, in forms that the server's own reader understands."""

import asyncio
import io
import wave
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from scripted_server import DONE, LAST, STREAM, Request, event, part, scripted, whole
from sounds import noise, written

from server.bench.endpoints import endless_requests, request_body
from server.bench.load_generator import Result
from server.bench.recordings import FORM, Recording, form_of, recordings_at
from server.bench.serve_options import BenchError, LoadOptions
from server.commands import run
from server.http.multipart import FormReader


def read(body: bytes) -> tuple[list[tuple[str, str]], bytes]:
    reader = FormReader(FORM, most_fields=16)
    data = reader.push(body)
    reader.check_complete()
    return list(reader.values), bytes(data)


def test_a_form_is_read_as_it_was_written() -> None:
    fields = {"model": "m", "stream": True, "temperature": 0.5, "include": ["logprobs", "a"]}
    values, data = read(form_of(Recording('a"b.wav', b"\r\n--x\0", 1.0), fields))
    assert values == [
        ("model", "m"),
        ("stream", "true"),
        ("temperature", "0.5"),
        ("include", "logprobs"),
        ("include", "a"),
    ]
    assert data == b"\r\n--x\0"


def test_noise_is_new_in_each_request_and_the_same_for_a_seed() -> None:
    asked = LoadOptions(endpoint="audio", random_audio_seconds=0.5)
    first, second = islice(endless_requests(asked), 2)
    assert first.recording and second.recording and first.recording.data != second.recording.data
    assert next(endless_requests(asked)).recording == first.recording
    with wave.open(io.BytesIO(first.recording.data)) as file:
        assert file.getnframes() == 8000 == first.seconds * file.getframerate()


def test_what_is_asked_beside_the_recording() -> None:
    [asked] = islice(endless_requests(LoadOptions(endpoint="audio", random_audio_seconds=0.1)), 1)
    plain, _ = read(request_body(asked, "m", LoadOptions(endpoint="audio")))
    assert plain == [("model", "m"), ("stream", "true"), ("stream_include_usage", "true")]
    options = LoadOptions(endpoint="audio", temperature=0.0, extra_body={"stream": False, "language": "en"})
    told, _ = read(request_body(asked, "m", options))
    assert told == [("model", "m"), ("temperature", "0.0"), ("stream", "false"), ("language", "en")]


def test_files_are_sent_as_they_are_with_their_lengths(tmp_path: Path) -> None:
    for name in ("b.webm", "a.mp3"):
        (tmp_path / name).write_bytes(written(noise(2.0), name.split(".")[1]))
    found = recordings_at(tmp_path)
    assert [each.name for each in found] == ["a.mp3", "b.webm"]
    assert [each.seconds for each in found] == pytest.approx([2.0, 2.0], abs=0.1)
    assert found[0].data == (tmp_path / "a.mp3").read_bytes()
    (tmp_path / "c.txt").write_bytes(b"no sound")
    for path, told in ((tmp_path, "c.txt is no recording"), (tmp_path / "none", "No such file")):
        with pytest.raises(BenchError, match=told):
            recordings_at(path)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_whole_run(streamed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def reply(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path != "/v1/audio/transcriptions":
            writer.write(whole({}, 404))
        elif streamed:
            usage = {"input_tokens": 4, "output_tokens": 6}
            done = event({"type": "transcript.text.done", "usage": usage})
            said = event({"type": "transcript.text.delta", "delta": "a"})
            writer.write(STREAM + part(said) + part(done + DONE) + LAST)
        else:
            writer.write(whole({"text": "a", "usage": {"type": "duration", "seconds": 1}}))

    output = tmp_path / "r.json"
    flags = ["--endpoint", "audio", "--audio-seconds", "0.5", "--concurrency", "2", "--num-prompts", "4"]
    flags += [] if streamed else ["--extra-body", '{"stream": false}']
    async with scripted(reply) as server:
        flags += ["--base-url", server.url, "--model", "m", "--output", str(output)]
        assert await asyncio.to_thread(run, "bench", ["serve", *flags]) == 0
    sent = [each for each in server.requests if each.path == "/v1/audio/transcriptions"]
    assert {each.headers["content-type"] for each in sent} == {FORM} and len(sent) == 5
    result = msgspec.json.decode(output.read_bytes(), type=Result)
    [point] = result.points
    assert (point.completed, point.audio_seconds, point.output_tokens) == (4, 2.0, 24 if streamed else 0)
    assert point.real_time_factor and (point.ttft is not None) == streamed
    assert result.dataset == {"name": "random", "seed": 0, "random_audio_seconds": 0.5}
    assert "real-time factor" in capsys.readouterr().out
