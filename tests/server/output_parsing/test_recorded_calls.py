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
from recorded_calls import FAMILIES, FIXTURES, cut, parts_of, reader_of, result_of

from server.output_parsing.unread_text import CallBegun, CallEnded

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
    assert broken == 28
