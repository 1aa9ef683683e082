"""What the probe of the suite canitoolcall asks for, as each family's template writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import canitoolcall.probe as suite
from canitoolcall.results import ParsedToolCall, ParseResult
from family_templates import TEMPLATES, written_answer

PARIS = {"city": "Paris"}
EVENT = {
    "title": "Design review",
    "start": "2026-10-01T15:00:00Z",
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
    "location": {"city": "Berlin", "room": "4.12"},
}
NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}
ANSWERS: dict[str, str | list[tuple[str, dict[str, Any]]]] = {
    "single-call": [("get_weather", PARIS)],
    "parallel-calls": [("get_weather", PARIS), ("get_weather", {"city": "Tokyo", "unit": "c"})],
    "no-call": "42",
    "nested-args": [("create_event", EVENT)],
    "unicode-args": [("save_note", NOTE)],
    "empty-args": [("get_server_time", {})],
    "forced-tool-choice": [("get_weather", {"city": "Lisbon"})],
    "tool-result-followup": "It is 18 °C and clear.",
    "reasoning-then-call": [("record_answer", {"answer": "9.9"})],
}
ANSWERS["required-calls"] = ANSWERS["parallel-calls"]

BY_ID = {each.id: each for each in suite.BUILTIN_SCENARIOS}
REQUIRED = replace(BY_ID["parallel-calls"], id="required-calls", tool_choice="required")
"""A scenario that the suite does not have."""


def answer_to(scenario: str, family: str) -> ParseResult:
    """The answer that a scenario wants, with reasoning if the family has some."""
    answer = ANSWERS[scenario]
    reasoning = "9.11 < 9.9, I think." if "reasoning" in TEMPLATES[family].turn else None
    if isinstance(answer, str):
        return ParseResult(answer, reasoning)
    calls = (ParsedToolCall(name, json.dumps(arguments)) for name, arguments in answer)
    return ParseResult(None, reasoning, tuple(calls))


def written_for(scenario: suite.Scenario, family: str) -> str:
    """The same as the family's template writes it."""
    messages = [dict(message) for message in scenario.messages]
    return written_answer(family, messages, as_message(*as_read(answer_to(scenario.id, family))))


def check_report(report: suite.ProbeReport, family: str) -> None:
    """Fails unless everything has passed, and every call, text and reasoning is what the template wrote."""
    assert len(report.outcomes) >= 27
    assert report.summary()["pass"] == len(report.outcomes), report.render_text()
    for outcome in report.outcomes:
        if outcome.observed is not None:
            assert as_read(outcome.observed) == as_read(answer_to(outcome.scenario_id, family))
    # A tool that the request names ends with "stop", as OpenAI has it; the probe remarks on it.
    assert {each.scenario_id for each in report.outcomes if each.warnings} == {"forced-tool-choice"}


def as_message(
    content: str | None, reasoning: str | None, calls: Iterable[tuple[str, Mapping[str, Any]]]
) -> dict[str, Any]:
    """A message of the assistant."""
    functions = [
        {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)} for name, arguments in calls
    ]
    tool_calls = [
        {"id": f"functions.{each['name']}:{n}", "function": each} for n, each in enumerate(functions)
    ]
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": tool_calls,
    }


def as_read(result: ParseResult) -> tuple[str | None, str | None, list[tuple[str, Any]]]:
    """The text, the reasoning and the calls of a result."""
    return (
        result.content,
        result.reasoning_content,
        [(call.name, call.arguments()) for call in result.tool_calls],
    )
