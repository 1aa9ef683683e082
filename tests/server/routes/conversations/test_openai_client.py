"""The official client of OpenAI's API understands what /v1/responses answers, as does what Codex sends."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fake_api import make_app
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


async def test_conversations(frontend: FakeFrontend, tmp_path: Path) -> None:
    app = make_app(frontend, tool_call_parser="hermes", reasoning_parser="qwen3", work_folder=tmp_path)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with openai.AsyncOpenAI(api_key="-", base_url="http://localhost/v1", http_client=http) as client:
        kept = await client.conversations.create()
        said: Any = {"role": "user", "content": "I am Ann."}
        await client.conversations.items.create(kept.id, items=[said])
        answer = await client.responses.create(model="tiny", input="hi", conversation=kept.id)
        assert answer.conversation is not None and answer.conversation.id == kept.id
        items = [item async for item in client.conversations.items.list(kept.id, order="asc", limit=2)]
        assert [item.type for item in items] == ["message"] * 2 + [item.type for item in answer.output]
        found = await client.conversations.items.retrieve(items[0].id or "", conversation_id=kept.id)
        assert found == items[0]
        await client.conversations.items.delete(found.id or "", conversation_id=kept.id)
        changed = await client.conversations.update(kept.id, metadata={"a": "b"})
        assert changed == await client.conversations.retrieve(kept.id)
        assert (await client.conversations.delete(kept.id)).deleted
