"""The probe of the suite canitoolcall passes, whole and streamed, with the templates of its nine families.

The engine "generates" what the family's template writes for the answer that a scenario asks for.
"""

import asyncio
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.request import Request

import canitoolcall.probe as suite
import pytest
from canitoolcall.results import ParsedToolCall, ParseResult
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend
from family_templates import TEMPLATES, family_tokenizer, written_answer
from model_facts import changed
from recorded_calls import FIXTURES

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


def answer_to(scenario: str, family: str) -> ParseResult:
    answer = ANSWERS[scenario]
    reasoning = "9.11 < 9.9, I think." if "reasoning" in TEMPLATES[family].turn else None
    if isinstance(answer, str):
        return ParseResult(answer, reasoning)
    calls = (ParsedToolCall(name, json.dumps(arguments)) for name, arguments in answer)
    return ParseResult(None, reasoning, tuple(calls))


def as_message(
    content: str | None, reasoning: str | None, calls: Iterable[tuple[str, Mapping[str, Any]]]
) -> dict[str, Any]:
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
    return (
        result.content,
        result.reasoning_content,
        [(call.name, call.arguments()) for call in result.tool_calls],
    )


class Answer(io.BytesIO):
    """An answer, as urllib hands it to the probe."""

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(body)
        self.headers = headers


class Opener:
    """Sends the probe's requests to an app in this process, whose engine writes the answers wanted."""

    def __init__(self, family: str) -> None:
        self._family, self._loop = family, asyncio.get_running_loop()
        tokenizer = family_tokenizer(family)
        self._frontend = FakeFrontend(tokenizer=tokenizer)
        known = {"max_model_len": 4096, "vocab_size": tokenizer.vocab_size}
        self._frontend.facts = changed(self._frontend.facts, **known)
        self._client = make_client(make_app(self._frontend))

    def open(self, request: Request, timeout: float) -> Answer:
        assert isinstance(request.data, bytes)
        return asyncio.run_coroutine_threadsafe(self._answer(request.data), self._loop).result(timeout)

    async def _answer(self, raw: bytes) -> Answer:
        messages = json.loads(raw)["messages"]
        scenario = next(each for each in suite.BUILTIN_SCENARIOS if [*each.messages] == messages)
        message = as_message(*as_read(answer_to(scenario.id, self._family)))
        text = written_answer(self._family, messages, message)
        self._frontend.reply_ids = self._frontend.tokenizer.encode(text, add_special_tokens=False)
        headers = {"Content-Type": "application/json"}
        response = await self._client.post("/v1/chat/completions", content=raw, headers=headers)
        assert response.status_code == 200, response.text
        return Answer(response.content, response.headers)


@pytest.mark.parametrize("family", TEMPLATES)
async def test_the_probe_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_OPENER", Opener(family))
    report = await asyncio.to_thread(suite.probe, "http://localhost/v1", "tiny", concurrency=1)
    assert report.summary() == {"pass": 27, "fail": 0, "error": 0, "skip": 0}, report.render_text()
    for outcome in report.outcomes:
        if outcome.observed is not None:
            assert as_read(outcome.observed) == as_read(answer_to(outcome.scenario_id, family))
    # A tool that the request names ends with "stop", as OpenAI has it; the probe remarks on it.
    assert {each.scenario_id for each in report.outcomes if each.warnings} == {"forced-tool-choice"}


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_templates_write_what_the_families_own_have_written(family: str) -> None:
    template = TEMPLATES[family]
    compared = 0
    for fixture in FIXTURES:
        said = fixture.expected
        if (
            said is None
            or fixture.reference_model != template.model
            or fixture.provenance.kind != "template_render"
            or not fixture.id.startswith(template.renders)
            or fixture.truncated
            or (fixture.thinking is False and template.opens)  # the prompt has closed the reasoning
            or "multi-turn" in fixture.id
        ):
            continue
        calls = ((call.name, call.arguments) for call in said.tool_calls)
        message = as_message(said.content, said.reasoning_content, calls)
        assert written_answer(family, [{"role": "user", "content": "?"}], message) == fixture.raw_output
        compared += 1
    assert compared >= 3
