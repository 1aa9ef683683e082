"""Calls that are mended are told and counted."""

import json

import pytest
from fake_api import make_app, make_client, post
from fake_frontend import FakeFrontend

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


async def test_half_a_character_takes_no_arguments_away(frontend: FakeFrontend) -> None:
    frontend.reply = r'<tool_call>{"name": "get_weather", "arguments": {"city": "Paris \ud83d"}}</tool_call>'
    talk = [{"role": "user", "content": "hi"}]
    own = {"name": "get_weather", "input_schema": PARAMETERS}
    async with make_client(make_app(frontend, tool_call_parser="hermes")) as client:
        found = await post(client, "/v1/messages", model="tiny", max_tokens=99, messages=talk, tools=[own])
        assert found["content"][0]["input"] == {"city": "Paris \ufffd"}
        found = await post(client, "/api/chat", model="tiny", messages=talk, tools=TOOLS, stream=False)
        assert found["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris \ufffd"}


async def test_what_is_mended_is_told_and_counted(
    frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.reply = (
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    )
    client = make_client(make_app(frontend, tool_call_parser="qwen3_coder"))
    talk = [{"role": "user", "content": "hi"}]
    (choice,) = (await post(client, "/v1/chat/completions", messages=talk, tools=TOOLS))["choices"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert "a malformed tool call was repaired (qwen3_coder): <function= without its opener" in caplog.text
    page = (await client.get("/metrics")).text
    (counted,) = (line for line in page.splitlines() if line.startswith("facet:tool_calls_repaired_total{"))
    assert 'dialect="qwen3_coder"' in counted and counted.endswith(" 1.0")
