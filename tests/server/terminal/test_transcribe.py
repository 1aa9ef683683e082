"""`facet transcribe` against the real HTTP API."""

from pathlib import Path

import pytest
from fake_frontend import FakeFrontend
from sounds import noise, written
from speech_frontend import let_transcribe, says

from server.commands import BAD_USAGE, FAILED, run


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "ä talk.flac"
    path.write_bytes(written(noise(1.0), "flac"))
    return path


def test_texts_and_subtitles(
    frontend: FakeFrontend, url: str, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    let_transcribe(frontend, says(" Hello you."))
    assert run("facet", ["transcribe", str(recording), "--url", url]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello you.\n" and "1 file in" in printed.err
    options = ["--format", "srt", "--beside", "--translate", "--language", "german", "--prompt", "Ann"]
    assert run("facet", ["transcribe", str(recording), "--url", url, *options]) == 0
    assert recording.with_suffix(".srt").read_text().startswith("1\n00:00:00,000 --> 00:00:01,000\nHello")
    assert run("facet", ["transcribe", str(recording), "--url", url, "--language", "klingon"]) == FAILED
    assert "no language of this model" in capsys.readouterr().err
    assert run("facet", ["transcribe", "nothing.wav", "--url", url]) == BAD_USAGE
    assert run("facet", ["transcribe", str(recording), "--words"]) == BAD_USAGE


def test_other_models_are_refused(
    frontend: FakeFrontend, url: str, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frontend.transcriber is None
    assert run("facet", ["transcribe", str(recording), "--url", url]) == FAILED
    assert "cannot transcription; it can generate" in capsys.readouterr().err
