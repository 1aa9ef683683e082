"""POST /v1/responses, whole and streamed."""

import asyncio
from typing import Any

import httpx
from fake_api import leave, named_events, post, refusal
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

from server.errors import Overloaded

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(PATH, json={"input": "hi", "tools": [TOOL], **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named_events(response.text)


async def test_headers_may_be_sent_before_an_error(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.waits, frontend.expected = True, 5.0
    frontend.error = Overloaded("Full.", retry_after=3)
    created, progress, failed = await stream(client)
    assert (created["type"], progress["type"]) == ("response.created", "response.in_progress")
    assert failed["response"]["error"]["code"] == "rate_limit_exceeded"


async def test_a_client_that_leaves_ends_its_request(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    await asyncio.wait_for(leave(app, PATH, {"input": "hi", "stream": True}, after=1), 60)
    assert (frontend.running, frontend.finished) == (0, 0)


async def test_the_tokens_of_an_input_are_counted(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    counted = await post(client, PATH + "/input_tokens", input="hi", instructions="be", tools=[TOOL])
    answer = await post(client, PATH, input="hi", instructions="be", tools=[TOOL])
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    long = await post(client, PATH + "/input_tokens", input="x" * 9000)
    assert long["input_tokens"] > frontend.facts.max_model_len


async def test_a_conversation_that_is_too_long(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": str(number) * 500} for number in range(10)]
    error = await refusal(client, PATH, input=items, instructions="be")
    assert "maximum context length" in error["message"]
    await post(client, PATH, input=items, instructions="be", truncation="auto", max_output_tokens=1)
    prompt = bytes(frontend.asked[-1][0]).decode()
    assert prompt.startswith("<system>be\n<user>2222") and "<user>9999" in prompt
    long = [*items, {"role": "user", "content": "x" * 5000}]
    await refusal(client, PATH, input=long, truncation="auto")


async def test_requests_are_counted_by_their_route(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    await post(client, PATH, input="hi")
    await client.get(PATH + "/some-id")
    text = (await client.get("/metrics")).text
    assert 'handler="/v1/responses"' in text and 'handler="/v1/responses/{response_id}"' in text
