"""The short way to an endpoint: whatever it answers, the framework would have answered."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend
from fastapi import FastAPI

from server import app
from server.app import ROUTERS, openapi_schema
from server.http.middleware import CLIENT_GONE
from server.http.shortcut import find_endpoints
from server.status import Starting

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
BODIES = [
    (COMPLETIONS, b'{"prompt": "hi", "max_tokens": 3}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": true}'),
    (TOKENIZE, b'{"prompt": "hi"}'),
    (COMPLETIONS, b'{"prompt": "hi", "max_tokens": "x"}'),
    (COMPLETIONS, b'{"prompt": "hi", "temperature": NaN}'),
    (COMPLETIONS, b'{"prompt": "hi", "temperature": 1e400}'),
    (COMPLETIONS, b'{"prompt": "hi", "seed": 123456789012345678901234567890}'),
    (COMPLETIONS, b'{"prompt": "\\ud800"}'),
    (COMPLETIONS, b'{"prompt": "hi", "temprature": 0}'),
    (COMPLETIONS, b'{"prompt": "one", "prompt": "two", "max_tokens": 2}'),
    (COMPLETIONS, b'\xef\xbb\xbf{"prompt": "hi", "max_tokens": 2}'),
    (COMPLETIONS, '{"prompt": "hi", "max_tokens": 2}'.encode("utf-16")),
    (COMPLETIONS, b'{"prompt": "\xff"}'),
    (COMPLETIONS, b"[" * 100_000),
    (COMPLETIONS, b'{"prompt": '),
    (COMPLETIONS, b"null"),
    (COMPLETIONS, b"[]"),
    (COMPLETIONS, b""),
    (COMPLETIONS, b'{"prompt": "hi", "model": "other"}'),
]


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
async def client(frontend: FakeFrontend) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(make_app(frontend)) as client:
        yield client


@pytest.fixture
async def long_way(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """To the same endpoints, through the framework."""
    with monkeypatch.context() as patch:
        patch.setattr(app, "find_endpoints", lambda routers: {})
        long = make_app(frontend)
    async with make_client(long) as client:
        yield client


def same_for_all(response: httpx.Response) -> tuple[int, dict[str, str], str]:
    """Without what no two answers share."""
    text = response.text
    for line in text.removeprefix("data: ").split("\n\ndata: "):
        if line.startswith("{") and "id" in (found := json.loads(line)):
            text = text.replace(found["id"], "ID").replace(str(found["created"]), "TIME")
    return response.status_code, dict(response.headers), text


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
async def test_both_ways_lead_to_the_same_answer(
    client: httpx.AsyncClient, long_way: httpx.AsyncClient, path: str, body: bytes, kind: str
) -> None:
    headers = {"content-type": kind}
    short = await client.post(path, content=body, headers=headers)
    long = await long_way.post(path, content=body, headers=headers)
    assert same_for_all(short) == same_for_all(long)


@pytest.mark.parametrize("body", [b'{"prompt": "hi"}', b'{"prompt": 1.5}', b'{"prompt"'])
async def test_both_ways_say_that_the_model_is_loading(
    frontend: FakeFrontend, client: httpx.AsyncClient, long_way: httpx.AsyncClient, body: bytes
) -> None:
    frontend.status = Starting("weights", 0.5)
    headers = {"content-type": "application/json"}
    short = await client.post(COMPLETIONS, content=body, headers=headers)
    long = await long_way.post(COMPLETIONS, content=body, headers=headers)
    assert same_for_all(short) == same_for_all(long)


def test_every_endpoint_that_takes_a_body_has_a_short_way() -> None:
    documented = {
        path
        for path, methods in openapi_schema()["paths"].items()
        if "requestBody" in methods.get("post", {})
    }
    assert find_endpoints(ROUTERS).keys() == documented


async def test_the_framework_is_not_bothered(frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("this request had no business here")

    monkeypatch.setattr(FastAPI, "__call__", broken)
    async with make_client(make_app(frontend)) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": "hi"})
        assert answer.status_code == 200
        with pytest.raises(RuntimeError):
            await client.get("/live")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_told_once_and_logged(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(frontend, "generate", broken)
    body = {"prompt": "hi", "stream": stream}
    transport = httpx.ASGITransport(make_app(frontend), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Internal server error"
    async with make_client(make_app(frontend)) as client:
        with pytest.raises(RuntimeError, match="secret"):  # which the HTTP server writes into its log
            await client.post(COMPLETIONS, json=body)


async def test_a_client_that_leaves_while_it_speaks(frontend: FakeFrontend) -> None:
    """Nobody reads the answer, but it is counted as what it was."""
    messages: list[Any] = [
        {"type": "http.request", "body": b'{"prompt"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await make_app(frontend)(_scope(COMPLETIONS), receive, send)
    assert sent[0]["status"] == CLIENT_GONE
    assert frontend.most_running == 0


def _scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"api")],
    }


async def test_under_a_path_that_a_proxy_has_put_before(frontend: FakeFrontend) -> None:
    transport = httpx.ASGITransport(make_app(frontend), root_path="/under")
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        assert (await client.post("/under" + COMPLETIONS, json={"prompt": "hi"})).status_code == 200
