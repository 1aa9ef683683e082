"""`facet decide` and `facet calibrate`: what they ask a server, show, find and refuse."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_frontend import FakeFrontend

from server.requests.decisions import read_temperatures, tempered
from server.run.commands import BAD_USAGE, run
from server.terminal.calibrate import Known, calibration_error, fit

TRUE = {"type": "predicate", "name": "rain", "instructions": "It rains."}
TEAM = {"type": "choice", "instructions": "Who?", "choices": [{"value": "a"}, {"value": True}]}
MOOD = {
    "type": "score",
    "name": "mood",
    "instructions": "How?",
    "levels": [{"label": "bad"}, {"label": "good"}],
}


@pytest.fixture(autouse=True)
def reader(frontend: FakeFrontend) -> None:
    frontend.serve("generate", max_model_len=4096)


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_text_is_decided_about(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write(tmp_path / "text", "Rain today.")
    questions = write(tmp_path / "questions.json", {"questions": [TRUE, TEAM, MOOD]})
    assert run("facet", ["decide", text, "--questions", questions, "--url", url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [
        *(["rain", "yes"], ["2", "a"], ["True", lines[2][1]]),
        *(["mood", "bad"], ["good", lines[4][1]]),
    ]
    assert run("facet", ["decide", text, "--questions", questions, "--url", url, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["answers"]) == 3


@pytest.mark.parametrize("content", ["no JSON", "1", '["one"]'])
def test_questions_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    text = write(tmp_path / "text", "Rain today.")
    assert run("facet", ["decide", text, "--questions", write(tmp_path / "q", content)]) == BAD_USAGE
    assert run("facet", ["decide", text, "--questions", str(tmp_path / "none")]) == BAD_USAGE


def test_a_temperature_is_found_that_the_server_takes(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model always prefers the first option, by as much, which is right in three of four lines."""
    lines = [
        {"input": f"{n}", "questions": [{**TEAM, "label": True if n % 4 < 2 and n % 8 else "a"}, MOOD]}
        for n in range(32)
    ]
    data = write(tmp_path / "data", "\n".join(map(json.dumps, lines)))
    output = tmp_path / "calibration.json"
    assert run("facet", ["calibrate", data, "-o", str(output), "--url", url]) == 0
    assert "choice: temperature" in (told := capsys.readouterr().out) and "score" not in told
    assert read_temperatures(output).keys() == {"choice"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "at least 8 questions"),
        ([{"input": "x", "questions": [TRUE]}] * 2, "at least 8 questions"),
        ([1], "each line is an object"),
        ([{"input": "x", "questions": [{**TEAM, "label": "c"}]}], "none of its answers"),
    ],
)
def test_data_that_calibrate_nothing(
    url: str, tmp_path: Path, lines: list[Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "data", "\n".join(map(json.dumps, lines)))
    assert run("facet", ["calibrate", data, "-o", str(tmp_path / "out"), "--url", url]) == BAD_USAGE
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_temperature_is_the_one_by_which_answers_were_made_too_sure() -> None:
    honest = [0.6, 0.4]
    sure = tempered(honest, 1 / 3)
    known = [Known(sure, 0)] * 6 + [Known(sure, 1)] * 4
    assert fit(known) == pytest.approx(3, rel=1e-3)
    assert calibration_error(known, 3.0) == pytest.approx(0, abs=1e-9)
    assert calibration_error(known, 1.0) == pytest.approx(sure[0] - 0.6)
    assert math.isclose(fit([Known([0.9, 0.1], 1)] * 4), 20, rel_tol=1e-3), "it has bounds"
