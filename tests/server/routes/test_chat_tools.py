"""Chat answers with tool calls and reasoning, whole and streamed."""

from __future__ import annotations

import logging

import httpx
import msgspec
import openai
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend, byte_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa<ris"}}\n</tool_call>'
ANSWER = f"<think>\nThey ask.\n</think>\n\nI look.\n{CALL}\n{CALL}"


@pytest.fixture
def client(frontend: FakeFrontend) -> httpx.AsyncClient:
    frontend.reply = ANSWER
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=4096)
    return make_client(make_app(frontend, tool_call_parser="hermes", reasoning_parser="qwen3"))


async def test_openais_client_collects_a_stream(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # older versions want it
    openai_client = openai.AsyncOpenAI(api_key="x", base_url="http://localhost/v1", http_client=client)
    async with openai_client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=[strict],  # type: ignore[list-item]
    ) as stream:
        final = await stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["get_weather"] * 2


async def test_a_model_whose_template_has_no_tools_is_told_of_them_everywhere(
    frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    frontend = type(frontend)(tokenizer=byte_tokenizer(template=template), reply=f"I look.\n{CALL}")
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=4096)
    said, function = [{"role": "user", "content": "hi"}], TOOL["function"]
    own = {"name": "get_weather", "input_schema": {"type": "object"}}
    plain = {"model": "tiny", "stream": False, "max_tokens": 200}
    bodies = {
        "/v1/chat/completions": {**plain, "messages": said, "tools": [TOOL]},
        "/v1/responses": {"model": "tiny", "input": "hi", "tools": [{"type": "function", **function}]},
        "/v1/messages": {**plain, "messages": said, "tools": [own]},
        "/api/chat": {**plain, "messages": said, "tools": [TOOL]},
    }
    caplog.set_level(logging.WARNING, "server.frontend.asks")
    async with make_client(make_app(frontend)) as client:
        for path, body in bodies.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 200 and "described to it in text" in answer.headers["warning"]
            assert '"get_weather"' in answer.text and "Pa<ris" in answer.text and "_call>" not in answer.text
            prompt = bytes(frontend.asked[-1][0]).decode()
            assert prompt.startswith("<system>You can call tools.") and prompt.endswith("<user>hi")
    assert len(caplog.messages) == 1
