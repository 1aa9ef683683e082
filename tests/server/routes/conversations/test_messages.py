"""POST /v1/messages, whole and streamed."""

import asyncio
from typing import Any

import httpx
import pytest
from fake_api import leave, make_app, named_events
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

from server.http import sse

PATH = "/v1/messages"
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
BODY = {"model": "tiny", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(PATH, json={**BODY, **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named_events(response.text)


async def test_a_silent_stream_is_kept_alive_by_pings(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "OPEN_AFTER", 0.01)
    frontend.gate = asyncio.Event()  # nothing comes after the first tokens
    app = make_app(frontend, sse_keep_alive_interval=0.01)
    begin, *silence = await asyncio.wait_for(leave(app, PATH, {**BODY, "stream": True}, after=3), 60)
    assert b"message_start" in begin
    assert all(piece.endswith(b'event: ping\ndata: {"type":"ping"}\n\n') for piece in silence)


async def test_a_client_that_leaves_ends_its_request(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    await asyncio.wait_for(leave(app, PATH, {**BODY, "stream": True}, after=1), 60)
    assert (frontend.running, frontend.finished) == (0, 0)
