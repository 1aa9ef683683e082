"""POST /v1/messages, whole and streamed."""

import asyncio

import httpx
import pytest
from fake_api import leave, make_app
from fake_frontend import FakeFrontend

from server.http import sse

PATH = "/v1/messages"
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
BODY = {"model": "tiny", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}


async def test_a_silent_stream_is_kept_alive_by_pings(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "OPEN_AFTER", 0.01)
    frontend.gate = asyncio.Event()  # nothing comes after the first tokens
    app = make_app(frontend, sse_keep_alive_interval=0.01)
    begin, *silence = await asyncio.wait_for(leave(app, PATH, {**BODY, "stream": True}, after=3), 60)
    assert b"message_start" in begin
    assert all(piece.endswith(b'event: ping\ndata: {"type":"ping"}\n\n') for piece in silence)


async def test_a_thread_is_refused_by_the_code_that_makes_clients_send_all_messages(
    client: httpx.AsyncClient,
) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        response = await client.post(PATH, json={**BODY, "thread": thread})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["details"] == {"error_code": "thread_unsupported_request"}
        assert "send all of them" in error["message"]
    assert (await client.post(PATH, json={**BODY, "thread": None})).status_code == 200
