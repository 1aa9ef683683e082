"""The official client of the OpenAI API understands every answer."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from fake_frontend import FakeFrontend
from openai import AsyncOpenAI
from starlette.types import ASGIApp

from server.errors import Unavailable


@pytest.fixture
async def openai_client(app: ASGIApp) -> AsyncIterator[AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with AsyncOpenAI(
        api_key="-", base_url="http://localhost/v1", http_client=http, max_retries=0
    ) as client:
        yield client


async def test_chat(openai_client: AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, seed=1
    )
    [choice] = answer.choices
    assert choice.message.content == "Hello, world."
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert choice.logprobs.content[0].top_logprobs[1].token == "I"
    assert answer.usage is not None and answer.usage.completion_tokens == 14


@pytest.mark.parametrize("include_usage", [True, False])
async def test_chat_stream(openai_client: AsyncOpenAI, include_usage: bool) -> None:
    stream = await openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True} if include_usage else None,
        extra_body={"include": ["timing"]},
    )
    chunks = [chunk async for chunk in stream]
    spoken = chunks[:-1] if include_usage else chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in spoken) == "Hello, world."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [bool(chunk.choices) for chunk in chunks][-1] != include_usage
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 34
    assert chunks[-1].usage.model_extra is not None and "total_ms" in chunks[-1].usage.model_extra["timing"]


async def test_an_answer_goes_back_as_a_message(frontend: FakeFrontend, openai_client: AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}]
    )
    said: Any = answer.choices[0].message.model_dump()
    await openai_client.chat.completions.create(
        model="tiny", messages=[said, {"role": "user", "content": "b"}]
    )
    assert bytes(frontend.asked[-1][0]).decode() == "<assistant>Hello, world.\n<user>b\n<assistant>"


async def test_completions(openai_client: AsyncOpenAI) -> None:
    answer = await openai_client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["aHello, world.", "bHello, world."]
    stream = await openai_client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, world."


async def test_models(openai_client: AsyncOpenAI) -> None:
    assert [model.id async for model in openai_client.models.list()] == ["org/tiny", "tiny"]
    assert (await openai_client.models.retrieve("tiny")).id == "tiny"


async def test_errors_have_their_classes(frontend: FakeFrontend, openai_client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await openai_client.completions.create(model="x", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        await openai_client.completions.create(model="tiny", prompt="a", temperature=3)
    assert refused.value.param == "temperature"
    frontend.error = Unavailable("The engine has stopped.")
    frontend.tokens_before_error = 3
    stream = await openai_client.completions.create(model="tiny", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="stopped"):
        async for _ in stream:
            pass
