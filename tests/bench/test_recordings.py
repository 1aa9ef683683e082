"""Recordings as a load sends them: noise and files, in forms that the server's own reader understands."""

import asyncio
from itertools import count
from pathlib import Path

import pytest
from recordings import FORM, Recording, Transcription, form_of, recordings_at, run
from scripted_server import DONE, LAST, STREAM, Request, event, part, scripted
from sounds import noise, written

from server.bench.serve_options import BenchError
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


def test_files_are_sent_as_they_are_with_their_lengths(tmp_path: Path) -> None:
    for name in ("b.webm", "a.mp3"):
        (tmp_path / name).write_bytes(written(noise(2.0), name.split(".")[1]))
    found = recordings_at(tmp_path)
    assert [each.name for each in found] == ["a.mp3", "b.webm"]
    assert [each.seconds for each in found] == pytest.approx([2.0, 2.0], abs=0.1)
    assert found[0].data == (tmp_path / "a.mp3").read_bytes()
    (tmp_path / "c.txt").write_bytes(b"no sound")
    for path, told in ((tmp_path, "c.txt is not a recording"), (tmp_path / "none", "No such file")):
        with pytest.raises(BenchError, match=told):
            recordings_at(path)


async def test_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    async def reply(request: Request, writer: asyncio.StreamWriter) -> None:
        usage = {"input_tokens": 4, "output_tokens": 6}
        done = event({"type": "transcript.text.done", "usage": usage})
        said = event({"type": "transcript.text.delta", "delta": "a"})
        writer.write(STREAM + part(said) + part(done + DONE) + LAST)

    flags = ["--audio-seconds", "0.5", "--concurrency", "2", "--num-prompts", "4", "--temperature", "0"]
    async with scripted(reply) as server:
        flags += ["--base-url", server.url, "--model", "m", "--extra-body", '{"language": "en"}']
        assert await asyncio.to_thread(run, flags, "recordings.py") == 0
    assert {(each.path, each.headers["content-type"]) for each in server.requests} == {
        ("/v1/audio/transcriptions", FORM)
    }
    values, _ = read(server.requests[0].body)
    asked = [("model", "m"), ("stream", "true"), ("stream_include_usage", "true")]
    assert values == [*asked, ("temperature", "0.0"), ("language", "en")]
    shown = capsys.readouterr().out
    assert "real-time factor" in shown and "requests done" in shown


def test_a_transcription_is_timed_by_its_first_text_and_counted_by_its_last_event() -> None:
    """An event of ours, which has chunks of vLLM in it, and those of OpenAI alone."""
    ours = {"type": "transcript.text.delta", "delta": "a", "choices": [{"delta": {"content": "a"}}]}
    last = {"type": "transcript.text.delta", "delta": "", "choices": [{"delta": {}, "finish_reason": "stop"}]}
    done = {"type": "transcript.text.done", "text": "ab", "usage": {"input_tokens": 8, "output_tokens": 5}}
    clock = count()
    answer = Transcription(lambda: float(next(clock)))
    for each in (ours, {**ours, "choices": []}, last, done):
        answer.receive(event(each))
    assert answer.finish(200) == (None, "")
    assert answer.times == [0.0, 1.0]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 5)
