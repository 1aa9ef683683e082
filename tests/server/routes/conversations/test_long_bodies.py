"""Long bodies, whose conversations a helper reads: the answers are those to the same bodies if short."""

from typing import Any

import httpx
import pytest
from fake_api import assert_the_same_if_long
from fake_frontend import FakeFrontend

FUNCTION = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "sun"}
TOOL = {"name": "get_weather", "input_schema": {"type": "object"}}
TALK = {"model": "tiny", "max_tokens": 900, "messages": [{"role": "user", "content": "hi"}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "hi", "instructions": "be", "tools": [FUNCTION], "metadata": {"a": "b"}}),
    ("/v1/responses", {"input": [CALL, RESULT], "tools": [FUNCTION, {"type": "web_search"}], "stream": True}),
    ("/v1/responses", {"input": "hi", "tools": [FUNCTION], "tool_choice": "none", "max_output_tokens": 3}),
    ("/v1/responses", {"input": [RESULT]}),
    ("/v1/responses", {"input": [{"type": "web_search_call"}, {"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"input": "x" * 5000}),
    ("/v1/responses", {"input": "hi", "temperature": 3}),
    ("/v1/responses/input_tokens", {"input": "hi", "tools": [FUNCTION]}),
    ("/v1/messages", {**TALK, "system": "be", "tools": [TOOL], "metadata": {"user_id": "a"}}),
    ("/v1/messages", {**TALK, "tools": [TOOL, {"type": "bash_20250124", "name": "bash"}], "stream": True}),
    ("/v1/messages", {**TALK, "tools": [TOOL], "tool_choice": {"type": "none"}, "max_tokens": 3}),
    ("/v1/messages", {**TALK, "thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}}),
    ("/v1/messages", {**TALK, "messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/messages", {**TALK, "stop_sequences": ["look"], "temperature": 3}),
    ("/v1/messages", {**TALK, "max_tokens": 0}),
    ("/v1/messages/count_tokens", {**TALK, "tools": [TOOL]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_answer_is_that_to_a_short_body(
    client: httpx.AsyncClient, frontend: FakeFrontend, path: str, body: dict[str, Any]
) -> None:
    await assert_the_same_if_long(client, frontend, path, body)
