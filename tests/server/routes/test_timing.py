"""Streams that wait say at once in how much time the engine expects their first token."""

import asyncio
import json
from typing import Any

import pytest
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

TEXT = ("/v1/completions", {"prompt": "hi", "max_tokens": 20})
TALK = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20})


async def messages_until_asked(app: ASGIApp, path: str, body: dict[str, Any], count: int) -> list[Any]:
    """The first messages to the HTTP server of a stream that is then left."""
    sent: list[Any] = []
    enough = asyncio.Event()
    pending = [{"type": "http.request", "body": json.dumps({**body, "stream": True}).encode()}]

    async def receive() -> Any:
        if not pending:
            await enough.wait()
            return {"type": "http.disconnect"}
        return pending.pop()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) >= count:
            enough.set()

    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "path": path}
    scope |= {
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "query_string": b"",
    }
    async with asyncio.timeout(60):
        await app(scope, receive, send)
    return sent


@pytest.mark.parametrize(("path", "body"), [TEXT, TALK])
async def test_a_stream_that_waits_sends_its_head_before_the_first_token(
    frontend: FakeFrontend, app: ASGIApp, path: str, body: dict[str, Any]
) -> None:
    frontend.waits, frontend.expected, frontend.delay = True, 2.5, 60.0
    begun = asyncio.get_running_loop().time()
    head, nothing = await messages_until_asked(app, path, body, 2)
    assert asyncio.get_running_loop().time() - begun < 0.9, "not by the timer that opens late streams"
    assert head["status"] == 200
    assert dict(head["headers"])[b"x-facet-expected-first-token-ms"] == b"2500.0"
    assert (nothing["body"], nothing["more_body"]) == (b"", True)
