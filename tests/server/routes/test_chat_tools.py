"""Chat answers with tool calls and reasoning, whole and streamed."""

from __future__ import annotations

import httpx
import msgspec
import openai
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend

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
