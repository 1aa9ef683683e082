"""Chat answers with tool calls and reasoning, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fake_api import make_app, make_client, post, post_stream
from fake_frontend import FakeFrontend

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
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


async def talk(client: httpx.AsyncClient, **body: Any) -> Any:
    return (await post(client, PATH, **{"messages": [USER], "tools": [TOOL], **body}))["choices"][0]


async def test_calls_and_reasoning_of_a_whole_answer(client: httpx.AsyncClient) -> None:
    choice = await talk(client)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning"]) == ("I look.", "They ask.")
    assert message["reasoning_content"] == "They ask."
    first, second = message["tool_calls"]
    assert first["id"].startswith("call_") and first["id"] != second["id"]
    assert "index" not in first and first["type"] == "function"
    assert first["function"]["name"] == "get_weather"
    assert json.loads(first["function"]["arguments"]) == {"city": "Pa<ris"}


async def test_a_stream_says_the_same(client: httpx.AsyncClient) -> None:
    whole = (await talk(client))["message"]
    chunks = await post_stream(client, PATH, messages=[USER], tools=[TOOL])
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["content"]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == whole["reasoning"]
    calls: dict[int, Any] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if call["index"] not in calls:
                assert call["index"] == len(calls) and call["id"] and call["type"] == "function"
                calls[call["index"]] = call
            else:
                assert "id" not in call and "name" not in call["function"]
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert [call["function"] for call in calls.values()] == [one["function"] for one in whole["tool_calls"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize("per_step", [1, 4])
async def test_chunks_of_a_call_bring_no_empty_text(
    frontend: FakeFrontend, client: httpx.AsyncClient, per_step: int
) -> None:
    frontend.reply, frontend.per_step = CALL, per_step
    chunks = await post_stream(client, PATH, messages=[USER], tools=[TOOL])
    first, *others, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert others and all(one["delta"].keys() == {"tool_calls"} for one in others)
    assert last["finish_reason"] == "tool_calls" and last["delta"].keys() <= {"tool_calls"}


async def test_chunks_without_a_delta_are_sent_for_what_else_they_tell(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.reply, frontend.per_step = CALL, 1
    told = {"return_token_ids": True}
    chunks = await post_stream(client, PATH, messages=[USER], tools=[TOOL], **told)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [one["delta"] for one in choices].count({}) > 0
    assert [id for one in choices for id in one.get("token_ids", ())][: len(CALL)] == list(CALL.encode())
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await post_stream(client, PATH, messages=[USER], tools=[TOOL], stream_options=usage)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert sorted(set(counts)) == list(range(max(counts) + 1))


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


@pytest.mark.parametrize("body", [{"tools": None}, {"tool_choice": "none"}])
async def test_without_tools_a_call_is_text(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    choice = await talk(client, **body)
    assert choice["message"]["tool_calls"] == [] and CALL in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_breaks_off_ends_with_length(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    choice = await talk(client, max_tokens=len(ANSWER) - len(CALL) - 20)
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"city": "Pa<ris"}'.startswith(call["function"]["arguments"])


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_tokens_of_reasoning_are_counted(
    frontend: FakeFrontend, client: httpx.AsyncClient, per_step: int
) -> None:
    frontend.per_step = per_step
    thought = len("\nThey ask.\n")  # a token is a byte
    usage = (await post(client, PATH, messages=[USER], tools=[TOOL], n=2))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * thought}
    chunks = await post_stream(client, PATH, messages=[USER], stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    cut = await post(client, PATH, messages=[USER], max_tokens=len("<think>") + 4, include_reasoning=False)
    assert cut["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    stopped = await post(client, PATH, messages=[USER], stop=["ask"])
    assert stopped["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("\nThey ask")}


async def test_a_call_inside_of_reasoning_ends_the_count(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.reply = f"<think>é <tool_call>{CALL}"
    usage = (await post(client, PATH, messages=[USER], tools=[TOOL]))["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("é <tool_call>".encode())


async def test_reasoning_can_be_left_out(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    message = (await talk(client, include_reasoning=False))["message"]
    assert message["reasoning"] is None and "reasoning_content" not in message
    assert message["content"] == "I look."


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_the_operator_chooses_the_field_of_reasoning(frontend: FakeFrontend, name: str) -> None:
    frontend.reply = "<think>a</think>b"
    app = make_app(frontend, reasoning_parser="qwen3", reasoning_field=name)
    message = (await talk(make_client(app), tools=None))["message"]
    fields = {key for key in ("reasoning", "reasoning_content") if message.get(key)}
    assert fields == {name}


async def test_a_prompt_may_open_the_reasoning(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.reply = "so\n</think>\n\nyes"
    message = (
        await talk(
            client, messages=[USER, {"role": "assistant", "content": "<think>"}], continue_final_message=True
        )
    )["message"]
    assert (message["reasoning"], message["content"]) == ("so", "yes")


async def test_an_answer_without_text_has_no_content(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.reply = CALL
    assert (await talk(client))["message"]["content"] is None


async def test_a_model_whose_format_is_not_known_answers_with_text(frontend: FakeFrontend) -> None:
    frontend.reply = CALL
    choice = await talk(make_client(make_app(frontend)))
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
