"""The official client of OpenAI's API understands what /v1/responses answers, as does what Codex sends."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import httpx2
import openai
import pytest
from fake_api import named_events
from fake_frontend import FakeFrontend
from pydantic import BaseModel
from starlette.types import ASGIApp

from server.errors import Unavailable

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'},
}
CODEX = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>all</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context>here</environment_context>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": '{"output": "a.txt"}'},
        {"type": "custom_tool_call", "status": "completed", "call_id": "call_2", "name": "apply_patch",
         "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done!"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False,
         "parameters": {"type": "object", "properties": {"command": {"type": "array"}}}},
        PATCH,
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [
            {"type": "function", "name": "read", "description": "", "strict": False, "parameters": {}}]},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-thread",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"},
}  # fmt: skip


@pytest.fixture
async def openai_client(app: ASGIApp) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with openai.AsyncOpenAI(
        api_key="-", base_url="http://localhost/v1", http_client=http, max_retries=0
    ) as client:
        yield client


async def test_an_answer_goes_back_as_input(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.responses.create(model="tiny", input="hi", tools=[TOOL])
    assert answer.output_text == "I look."
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
    said: list[Any] = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in answer.output)]
    said += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in answer.output
        if item.type == "function_call"
    ]
    again = await openai_client.responses.create(model="tiny", input=said, tools=[TOOL])
    assert again.status == "completed"


async def test_stream(openai_client: openai.AsyncOpenAI) -> None:
    async with openai_client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "I look."
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "I look."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [call.parsed_arguments for call in calls] == [{"city": "Pa<ris"}] * 2


async def test_parse(frontend: FakeFrontend, openai_client: openai.AsyncOpenAI) -> None:
    class Place(BaseModel):
        city: str

    frontend.reply = '{"city": "Paris"}'
    answer = await openai_client.responses.parse(model="tiny", input="hi", text_format=Place)
    assert answer.output_parsed == Place(city="Paris")


async def test_errors_have_their_classes(frontend: FakeFrontend, openai_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await openai_client.responses.create(model="x", input="a")
    with pytest.raises(openai.BadRequestError, match="send the items again"):
        await openai_client.responses.create(model="tiny", input="a", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        await openai_client.responses.retrieve("resp_1")
    frontend.error, frontend.tokens_before_error = Unavailable("The engine has stopped."), 30
    stream = await openai_client.responses.create(model="tiny", input="a", stream=True)
    assert [event.type async for event in stream][-1] == "response.failed"


async def test_what_codex_sends(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.reply = (
        '<think>so</think><tool_call>{"name": "mcp__files__read", "arguments": {"a": 1}}</tool_call>'
        '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n"}}</tool_call>'
    )
    response = await client.post("/v1/responses", json=CODEX)
    assert response.status_code == 200, response.text
    warnings = response.headers.get_list("warning")
    assert [text.partition('"')[2].partition(":")[0] for text in warnings] == [
        "tools left out, which this server does not run",
        "items left out, which no model here reads",
    ]
    *_, last = named_events(response.text)
    assert last["type"] == "response.completed"
    reasoning, read, patch = last["response"]["output"]
    assert reasoning["encrypted_content"]
    assert (read["namespace"], read["name"], read["arguments"]) == ("mcp__files", "read", '{"a": 1}')
    assert (patch["type"], patch["name"], patch["input"]) == (
        "custom_tool_call", "apply_patch", "*** Begin Patch\n",
    )  # fmt: skip
    prompt = bytes(frontend.asked[-1][0]).decode()
    assert prompt.startswith("<system>You are a coding agent.\n\n<permissions>all</permissions>\n<user>")
