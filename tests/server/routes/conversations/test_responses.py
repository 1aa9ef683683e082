"""POST /v1/responses, whole and streamed."""

import asyncio
from typing import Any

import httpx
from fake_api import leave, named_events, post, refusal
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(PATH, json={"input": "hi", "tools": [TOOL], **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named_events(response.text)


async def test_a_client_that_leaves_ends_its_request(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    await asyncio.wait_for(leave(app, PATH, {"input": "hi", "stream": True}, after=1), 60)
    assert (frontend.running, frontend.finished) == (0, 0)


async def test_a_conversation_that_is_too_long(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": str(number) * 500} for number in range(10)]
    error = await refusal(client, PATH, input=items, instructions="be")
    assert "maximum context length" in error["message"]
    await post(client, PATH, input=items, instructions="be", truncation="auto", max_output_tokens=1)
    prompt = bytes(frontend.asked[-1][0]).decode()
    assert prompt.startswith("<system>be\n<user>2222") and "<user>9999" in prompt
    long = [*items, {"role": "user", "content": "x" * 5000}]
    await refusal(client, PATH, input=long, truncation="auto")
