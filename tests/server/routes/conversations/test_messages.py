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


async def talk(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post(PATH, json={**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(PATH, json={**BODY, **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named_events(response.text)


async def refusal(client: httpx.AsyncClient, status: int, path: str = PATH, **body: Any) -> Any:
    response = await client.post(path, json={**BODY, **body})
    assert response.status_code == status, response.text
    answer = response.json()
    assert (answer.keys(), answer["type"]) == ({"type", "error"}, "error")
    return answer["error"]


async def test_an_answer_that_fills_the_window(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.reply = "x" * 5000
    for most in (4090, 32000):
        answer = await talk(client, max_tokens=most)
        assert answer["stop_reason"] == "model_context_window_exceeded"


async def test_errors_of_the_request(client: httpx.AsyncClient) -> None:
    assert (await refusal(client, 404, model="claude-x"))["type"] == "not_found_error"
    assert (await refusal(client, 400, messages=[]))["type"] == "invalid_request_error"
    assert (await refusal(client, 400, temperature=3))["type"] == "invalid_request_error"
    assert (await refusal(client, 404, PATH + "/batches"))["type"] == "not_found_error"
    broken = await client.post(PATH, content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["error"]["type"] == "invalid_request_error"
    long = await client.post(PATH, content=b" " * (5 << 20), headers={"content-type": "application/json"})
    assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")


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


async def test_the_tokens_of_the_very_prompt_are_counted(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    body = {"system": "be", "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}}
    answer = await talk(client, **body)
    counted = await client.post(
        PATH + "/count_tokens?beta=true",
        json={**body, **{key: BODY[key] for key in ("model", "messages", "tools")}},
    )
    assert counted.json() == {"input_tokens": answer["usage"]["input_tokens"]}
    long = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 9000}]}
    assert (await client.post(PATH + "/count_tokens", json=long)).json()["input_tokens"] > 9000
    assert (await refusal(client, 404, PATH + "/count_tokens", model="x"))["type"] == "not_found_error"
