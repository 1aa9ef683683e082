"""Counts of calls for a token and for a request, so that the server does not grow slower unnoticed.

Each limit is a twentieth to a seventh above the count when it was set.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from counted import counted
from fake_api import make_app, post_scope
from fake_client import FakeClient
from fake_frontend import FakeFrontend
from reading import generate
from starlette.types import ASGIApp

from server.frontend.frontend import Frontend
from server.requests.sampling_params import SamplingParams

TEXT = ("/v1/completions", {"prompt": "hi"})
TALK = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
ENDPOINTS = pytest.mark.parametrize(("path", "body"), [TEXT, TALK])

CALLS_FOR_A_STREAMED_TOKEN, CALLS_FOR_A_TOKEN = 38, 16
"""Calls of Python and C functions, from the engine's message to what is sent."""
CALLS_FOR_A_REQUEST = 650
"""Some ten of them look for control tokens in what users have written."""
CALLS_IN_FRONTEND = 30
"""Calls for a token, from the engine's message to the delta."""


async def cost(path: str, body: dict[str, Any], tokens: int, stream: bool) -> tuple[int, int]:
    """Counts the calls for one answer, and the messages to the HTTP server."""
    app = make_app(FakeFrontend(reply="words " * 40, per_step=1))
    data = json.dumps({**body, "max_tokens": tokens, "stream": stream}).encode()
    await _answer(app, path, data)  # excludes what is done once
    with counted() as calls:
        messages = await _answer(app, path, data)
    return calls.python + calls.c, messages


async def _answer(app: ASGIApp, path: str, data: bytes) -> int:
    sent: list[Any] = []
    pending = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if not pending:
            await asyncio.Event().wait()  # the client stays
        return pending.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(post_scope(path), receive, send)
    return len(sent)


@ENDPOINTS
@pytest.mark.parametrize(
    ("stream", "limit"), [(True, CALLS_FOR_A_STREAMED_TOKEN), (False, CALLS_FOR_A_TOKEN)]
)
async def test_a_token_costs_so_many_calls(path: str, body: dict[str, Any], stream: bool, limit: int) -> None:
    few, _ = await cost(path, body, 40, stream)
    many, _ = await cost(path, body, 100, stream)
    assert (many - few) / 60 <= limit


@ENDPOINTS
async def test_a_request_costs_so_many_calls(path: str, body: dict[str, Any]) -> None:
    calls, _ = await cost(path, body, 1, stream=True)
    assert calls <= CALLS_FOR_A_REQUEST


@ENDPOINTS
@pytest.mark.parametrize("tokens", [1, 40])
async def test_a_streamed_token_is_one_message(path: str, body: dict[str, Any], tokens: int) -> None:
    """A token is one message after the head. The last one includes the usage and the end of the stream."""
    _, messages = await cost(path, {**body, "stream_options": {"include_usage": True}}, tokens, stream=True)
    assert messages == 1 + tokens


async def test_a_token_costs_the_frontend_so_many_calls(
    client: FakeClient, ready: Callable[..., Awaitable[Frontend]]
) -> None:
    stream = generate(await ready(), [1], SamplingParams(max_tokens=60))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    [request] = client.submitted
    request.say([9])
    await first
    with counted() as calls:
        for _ in range(20):
            request.say([9])
            await anext(stream)
    assert (calls.python + calls.c) / 20 <= CALLS_IN_FRONTEND
    await stream.aclose()
