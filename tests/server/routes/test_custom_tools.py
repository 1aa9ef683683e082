"""Custom tools: the model calls a function with one string, and the client gets the text."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fake_api import make_app, make_client, post, post_stream, refusal
from fake_frontend import FakeFrontend

from server.grammar_checks.checker_process import AskedCalls

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
INPUT = 'print("é")\n'


def custom(**format: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "run", "description": "Runs it.", **format}}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"format": {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}}


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def client(frontend: FakeFrontend) -> httpx.AsyncClient:
    call = json.dumps({"name": "run", "arguments": {"input": INPUT}}, ensure_ascii=False)
    frontend.reply = f'<tool_call>{call}</tool_call><tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>'
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=4096)
    return make_client(make_app(frontend, tool_call_parser="hermes", reasoning_parser="none"))


async def test_calls_of_custom_tools_and_functions(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, messages=[USER], tools=[custom(), FUNCTION])
    first, second = answer["choices"][0]["message"]["tool_calls"]
    assert (first["type"], first["custom"]) == ("custom", {"name": "run", "input": INPUT})
    assert "function" not in first and second["function"] == {"name": "f", "arguments": "{}"}
    openai.types.chat.ChatCompletion.model_validate(answer, strict=False)


@pytest.mark.parametrize("per_step", [1, 7, 1000])
async def test_a_stream_says_the_same(
    frontend: FakeFrontend, client: httpx.AsyncClient, per_step: int
) -> None:
    frontend.per_step = per_step
    chunks = await post_stream(client, PATH, messages=[USER], tools=[custom(), FUNCTION])
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [delta["index"] for delta in deltas] == sorted(delta["index"] for delta in deltas)
    assert [delta["type"] for delta in deltas if "id" in delta] == ["custom", "function"]
    pieces = [delta["custom"]["input"] for delta in deltas if "custom" in delta]
    assert "".join(pieces) == INPUT
    assert per_step > 1 or len(pieces) > len(INPUT) // 2


async def test_an_input_that_breaks_off(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, messages=[USER], tools=[custom()], max_tokens=65)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert call["custom"]["input"] and INPUT.startswith(call["custom"]["input"])


async def test_what_the_model_sees(frontend: FakeFrontend) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    app = make_app(frontend, tool_call_parser="hermes", trust_request_chat_template=True)
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=4096)
    said = {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "run", "input": "x"}}],
    }
    body = {"messages": [USER, said, USER], "tools": [custom(**grammar("lark", "start: A"))]}
    await post(make_client(app), PATH, chat_template=template, **body)
    prompt = bytes(id for id in frontend.asked[-1][0] if id < 256).decode()
    assert '"name": "run", "description": "Runs it."' in prompt or '"description": "Runs it."' in prompt
    assert "start: A" in prompt and "is_custom" not in prompt and '{"input": "x"}' in prompt


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


async def test_a_grammar_that_is_only_told(client: httpx.AsyncClient) -> None:
    for syntax, warning in (("lark", "grammars told to the model but not enforced: run"), ("regex", None)):
        tools = [custom(**grammar(syntax, "start: A"))]
        response = await client.post(PATH, json={"messages": [USER], "tools": tools})
        assert response.status_code == 200
        assert response.headers.get("warning") == (warning and f'299 - "{warning}"')


@pytest.mark.parametrize(
    "tool",
    [{"type": "custom"}, custom(format="x"), custom(**grammar("bnf", "x")), custom(**grammar("lark", None))],  # type: ignore[arg-type]
)
async def test_a_wrong_tool(client: httpx.AsyncClient, tool: dict[str, Any]) -> None:
    assert (await refusal(client, PATH, messages=[USER], tools=[tool]))["param"] == "tools"
