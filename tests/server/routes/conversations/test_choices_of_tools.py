"""Calls that Responses and Messages demand are asked of the engine as chat completions does."""

from typing import Any

import httpx
import pytest
from fake_api import post
from fake_frontend import FakeFrontend

from engine_core.protocol import Grammar
from server.grammar_checks.grammar_job import AskedCalls

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NAMES = ("get_weather", "other")
FUNCTIONS = [{"type": "function", "name": name, "parameters": CITY} for name in NAMES]
RESPONSE: dict[str, Any] = {"input": "hi", "tools": FUNCTIONS}
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 3000,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"name": name, "input_schema": CITY} for name in NAMES],
}
WEATHER = {"type": "function", "name": "get_weather"}


def asked(frontend: FakeFrontend) -> AskedCalls:
    [one] = frontend.checked
    assert isinstance(one, AskedCalls)
    return one


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {**RESPONSE, "tool_choice": "required", "parallel_tool_calls": False}),
        ("/v1/messages", {**MESSAGE, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
    ],
)
async def test_one_call_may_be_required(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    await post(client, path, **body)
    assert [tool.name for tool in asked(frontend).tools] == [*NAMES] and not asked(frontend).several
    assert frontend.asked[-1][2].get("grammar") is not None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {**RESPONSE, "tool_choice": WEATHER}),
        (
            "/v1/responses",
            {**RESPONSE, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [WEATHER]}},
        ),
        ("/v1/messages", {**MESSAGE, "tool_choice": {"type": "tool", "name": "get_weather"}}),
    ],
)
async def test_a_tool_may_be_named(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await post(client, path, **body)
    assert [tool.name for tool in asked(frontend).tools] == ["get_weather"]
    assert answer.get("stop_reason", "tool_use") == "tool_use"


FORM = {"type": "json_schema", "name": "answer", "schema": {"type": "object", "properties": {"n": {}}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {**RESPONSE, "text": {"format": FORM}}),
        ("/v1/messages", {**MESSAGE, "output_config": {"format": FORM}}),
    ],
)
async def test_calls_may_take_the_place_of_a_form(
    frontend: FakeFrontend, client: httpx.AsyncClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    response = await client.post(path, json={"model": "tiny", **body, "stream": stream})
    assert response.status_code == 200 and "get_weather" in response.text
    [calls] = [each for each in frontend.checked if isinstance(each, AskedCalls)]
    assert calls.required and not calls.thinking
    assert len(frontend.checked) == 2
    grammar = frontend.asked[-1][2].get("grammar")
    assert isinstance(grammar, Grammar) and "(@answer | @calls)" in grammar.text
