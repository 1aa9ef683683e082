from __future__ import annotations

import pytest

from server.options.parsing import parse
from server.options.reader import OptionError


@pytest.mark.parametrize(
    "flags",
    [
        ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": false}'],
        ["--structured-outputs-config", "{}"],
        ["--guided-decoding-backend", "outlines"],
    ],
)
def test_every_grammar_engine_means_ours(flags: list[str]) -> None:
    assert parse(["demo", *flags]).engine.model == "demo"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"disable_any_whitespace": true}', "`disable_any_whitespace` is not supported"),
        ("[1]", "takes an object"),
    ],
)
def test_what_would_change_answers_is_refused(
    config: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, OptionError)) as raised:
        parse(["demo", "--structured-outputs-config", config])
    assert words in str(raised.value) + capsys.readouterr().err
