"""What models of nine families have written is read as a neutral suite says that it should be.

Its checks are those of the package: the calls, the text and the reasoning, no markers in them, arguments that
are JSON, and the same however a stream is cut.
"""

import json
import random

import pytest
from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture
from canitoolcall.results import Observation, Status
from recorded_calls import (
    FAMILIES,
    FIXTURES,
    as_tokens,
    cut,
    format_of,
    mutated,
    parts_of,
    reader_of,
    result_of,
)

from server.output_parsing.answer_format import literals_of
from server.output_parsing.unread_text import AnswerPart, CallBegun, CallEnded, Text

SOFTLY = {"gemma4/vllm-text-before-call"}
"""Outputs of which another of the suite wants the opposite: here, that space before a call is no text."""

FAMILY_FIXTURES = [(slug, [each for each in FIXTURES if each.family == slug]) for slug in sorted(FAMILIES)]


@pytest.mark.parametrize(("family", "fixtures"), FAMILY_FIXTURES, ids=sorted(FAMILIES))
def test_the_suite_passes(family: str, fixtures: list[Fixture]) -> None:
    for fixture in fixtures:
        text, rng = fixture.raw_output, random.Random(fixture.id)
        ways = {"one": [text], "token": list(text)}
        ways |= {f"rand:{seed}:8": list(cut(text, rng)) for seed in range(2)}
        streams = {way: result_of(parts_of(reader_of(fixture), pieces)) for way, pieces in ways.items()}
        rows = run_checks(fixture, FAMILIES[family], Observation(streams["one"], streams))
        wrong = [row for row in rows if row.status != Status.PASS]
        status = Status.SOFT_PASS if fixture.id in SOFTLY else Status.PASS
        assert case_status(rows) == status, (fixture.id, wrong)


def test_a_stream_says_the_same_and_what_has_passed_of_a_call_that_breaks_off_is_never_whole() -> None:
    broken = 0
    for fixture in FIXTURES:
        whole = result_of(parts_of(reader_of(fixture), [fixture.raw_output]))
        pieces = cut(fixture.raw_output, random.Random(fixture.id))
        parts = parts_of(reader_of(fixture, holds_calls=False), pieces)
        streamed = result_of(parts)
        assert (streamed.content, streamed.reasoning_content) == (whole.content, whole.reasoning_content)
        assert streamed.tool_calls[: len(whole.tool_calls)] == whole.tool_calls
        ended = {part.index for part in parts if isinstance(part, CallEnded)}
        for index in {part.index for part in parts if isinstance(part, CallBegun)} - ended:
            broken += 1
            with pytest.raises(ValueError):
                json.loads(streamed.tool_calls[index].arguments_raw or "")
    assert broken == 27


@pytest.mark.parametrize("fixtures", [each for _, each in FAMILY_FIXTURES], ids=sorted(FAMILIES))
def test_special_tokens_say_what_their_text_says(fixtures: list[Fixture]) -> None:
    for fixture in fixtures:
        family = FAMILIES[fixture.family]
        tokens = tuple(marker for marker in family.markers if marker.endswith(("|>", ">", "]", "｜")))
        format = format_of(fixture.reference_model, tokens)
        found = result_of(parts_of(reader_of(fixture, format), as_tokens(fixture, format)))
        assert found == result_of(parts_of(reader_of(fixture), [fixture.raw_output])), fixture.id


MUTATIONS = 5000
SHORT = [each for each in FIXTURES if len(each.raw_output) < 1000]


def text_behind_calls(parts: list[AnswerPart]) -> str:
    first = next((at for at, part in enumerate(parts) if isinstance(part, CallBegun)), len(parts))
    return "".join(part.text for part in parts[first:] if isinstance(part, Text))


@pytest.mark.turns
@pytest.mark.parametrize("seed", range(5))
def test_a_marker_that_is_wrong_never_becomes_text_behind_a_call(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(MUTATIONS // 5):
        fixture = rng.choice(SHORT)
        dialect = format_of(fixture.reference_model).dialect
        assert dialect is not None
        markers = sorted({each for each in literals_of(dialect) if len(each) > 2}, key=len, reverse=True)
        text = mutated(fixture.raw_output, markers, rng)
        parts = parts_of(reader_of(fixture), [text])
        whole, behind = result_of(parts), text_behind_calls(parts)
        if not any(opener in behind for opener in (*dialect.opens, *dialect.opens_bare)):
            assert not [closer for closer in dialect.format.closers if closer in behind], text
        assert result_of(parts_of(reader_of(fixture), cut(text, rng))) == whole, text
        streamed = parts_of(reader_of(fixture, holds_calls=False), cut(text, rng))
        ended = {part.index for part in streamed if isinstance(part, CallEnded)}
        calls = [call for at, call in enumerate(result_of(streamed).tool_calls) if at in ended]
        assert result_of(streamed).content == whole.content and [*whole.tool_calls] == calls, text
