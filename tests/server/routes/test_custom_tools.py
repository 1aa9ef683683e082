"""Custom tools: the model calls a function with one string, and the client gets the text."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import msgspec
import pytest
from fake_api import make_app, make_client, post
from fake_frontend import FakeFrontend

from server.grammar_checks.grammar_job import AskedCalls

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
INPUT = 'print("é")\n'


def custom(**format: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "run", "description": "Runs it.", **format}}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"format": {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}}


@pytest.fixture
def client(frontend: FakeFrontend) -> httpx.AsyncClient:
    call = json.dumps({"name": "run", "arguments": {"input": INPUT}}, ensure_ascii=False)
    frontend.reply = f'<tool_call>{call}</tool_call><tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>'
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=4096)
    return make_client(make_app(frontend, tool_call_parser="hermes", reasoning_parser="none"))


async def test_a_regular_expression_binds_the_input(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    tools = [custom(**grammar("regex", "[a-z]+|[0-9]+"))]
    choice = {"type": "custom", "custom": {"name": "run"}}
    answer = await post(client, PATH, messages=[USER], tools=tools, tool_choice=choice)
    assert answer["choices"][0]["finish_reason"] == "stop"
    [asked] = frontend.checked
    assert isinstance(asked, AskedCalls) and asked.required
    assert asked.tools[0].schema["properties"]["input"]["pattern"] == "^(?:[a-z]+|[0-9]+)$"


async def test_a_lark_grammar_without_nesting_binds_the_input(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    definition = 'start: line+\nline: ("+" | "-") /.*/ LF\n%import common.LF'
    response = await client.post(
        PATH, json={"messages": [USER], "tools": [custom(**grammar("lark", definition))]}
    )
    assert response.status_code == 200 and "warning" not in response.headers
    [asked] = frontend.checked
    assert isinstance(asked, AskedCalls) and not asked.required and asked.tools[0].bound
    pattern = re.compile(asked.tools[0].schema["properties"]["input"]["pattern"])
    assert pattern.match("+a\n-b\n") and not pattern.match("+a")
