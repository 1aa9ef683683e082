"""Calls that break off, and calls that are mended, in the answers of all APIs."""

import json
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client, post, post_stream
from fake_frontend import FakeFrontend
from thinking_api import app, client, frontend

__all__ = ["app", "client", "frontend"]

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
WHOLE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BROKEN = f"I look.\n{WHOLE}\n{WHOLE}"
TALK = [{"role": "user", "content": "hi"}]
CALLED = [("get_weather", {"city": "Paris"})]


@pytest.fixture
def end(frontend: FakeFrontend) -> int:
    """How many tokens there are of an answer that is cut in its second call, within the last brackets."""
    frontend.reply = BROKEN
    return len(BROKEN) - len("}\n</tool_call>")


async def test_chat_completions_have_the_calls_that_are_complete(client: httpx.AsyncClient, end: int) -> None:
    body: dict[str, Any] = {"messages": TALK, "tools": TOOLS, "max_tokens": end}
    (choice,) = (await post(client, "/v1/chat/completions", **body))["choices"]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLED
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "length")


async def test_responses_have_the_calls_that_are_complete(client: httpx.AsyncClient, end: int) -> None:
    tools = [{"type": "function", **FUNCTION}]
    found = await post(client, "/v1/responses", input="hi", tools=tools, max_output_tokens=end)
    text, call = found["output"]
    assert (text["content"][0]["text"], json.loads(call["arguments"])) == ("I look.", {"city": "Paris"})
    assert (found["status"], call["status"]) == ("incomplete", "completed")


async def test_messages_have_the_calls_that_are_complete(client: httpx.AsyncClient, end: int) -> None:
    tools = [{"name": "get_weather", "input_schema": PARAMETERS}]
    found = await post(client, "/v1/messages", model="tiny", messages=TALK, tools=tools, max_tokens=end)
    text, call = found["content"]
    assert (text["text"], call["input"], found["stop_reason"]) == ("I look.", {"city": "Paris"}, "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_ollama_has_the_calls_that_are_complete(
    client: httpx.AsyncClient, end: int, stream: bool
) -> None:
    body = {"model": "tiny", "messages": TALK, "tools": TOOLS, "options": {"num_predict": end}}
    answer = await client.post("/api/chat", json={**body, "stream": stream})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", [])]
    assert [(call["name"], call["arguments"]) for call in calls] == CALLED
    assert lines[-1]["done_reason"] == "length"


async def test_a_stream_leaves_the_arguments_of_a_call_open_that_breaks_off(
    client: httpx.AsyncClient, end: int
) -> None:
    body: dict[str, Any] = {"messages": TALK, "tools": TOOLS, "max_tokens": end}
    chunks = await post_stream(client, "/v1/chat/completions", **body)
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    first, second = (
        "".join(delta["function"]["arguments"] for delta in deltas if delta["index"] == index)
        for index in range(2)
    )
    assert (json.loads(first), second) == ({"city": "Paris"}, '{"city": "Paris"')
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_call_that_the_model_never_ends_is_no_reason_to_call(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.reply = WHOLE.removesuffix("}\n</tool_call>")
    body: dict[str, Any] = {"messages": TALK, "tools": TOOLS}
    (choice,) = (await post(client, "/v1/chat/completions", **body))["choices"]
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == ([], "stop")
    chunks = await post_stream(client, "/v1/chat/completions", **body)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_what_is_mended_is_told_and_counted(
    frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.reply = (
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    )
    client = make_client(make_app(frontend, tool_call_parser="qwen3_coder"))
    (choice,) = (await post(client, "/v1/chat/completions", messages=TALK, tools=TOOLS))["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert "a malformed tool call was repaired (qwen3_coder): <function= without its opener" in caplog.text
    page = (await client.get("/metrics")).text
    (counted,) = (line for line in page.splitlines() if line.startswith("facet:tool_calls_repaired_total{"))
    assert 'dialect="qwen3_coder"' in counted and counted.endswith(" 1.0")
