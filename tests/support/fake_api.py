"""The HTTP API over a `FakeFrontend`: its app, a client for it, requests, and a client that goes away."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import httpx
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

from engine_core.config import EngineConfig
from server.access.keyring import Access
from server.frontend.frontend import Frontend
from server.options.server_flags import ServerConfig
from server.reading.reading_context import ReadingOptions
from server.run.app import create_app


def make_app(frontend: FakeFrontend, *, work_folder: Path | None = None, **options: Any) -> ASGIApp:
    """The app itself. `options` are fields of ServerConfig."""
    config = frontend.config = ServerConfig(engine=EngineConfig(model="org/tiny"), **options)
    frontend.reading = ReadingOptions.of(config)
    frontend.access = Access(config.access, frontend.metrics.key_counters)
    return create_app(cast(Frontend, frontend), work_folder)


def make_client(app: ASGIApp, **transport: Any) -> httpx.AsyncClient:
    """A client of the app. `transport` are arguments of httpx's ASGITransport."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, **transport), base_url="http://localhost")


def events(text: str) -> list[Any]:
    """The data of an event stream; "[DONE]" as it stands. Comments and anything else between them fail."""
    blocks = text.split("\n\n")
    if blocks.pop() != "":
        raise ValueError("the stream does not end with an event")
    found: list[Any] = []
    for block in blocks:
        if not block.startswith("data: ") or "\n" in block:
            raise ValueError(f"not an event: {block!r}")
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def named_events(text: str) -> list[Any]:
    """The data of a stream whose events have names, each of which is the type of its data."""
    blocks = text.split("\n\n")
    if blocks.pop() != "":
        raise ValueError("the stream does not end with an event")
    found: list[Any] = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        if name != f"event: {found[-1]['type']}":
            raise ValueError(f"not the name of its event: {block!r}")
    return found


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def post_stream(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    """The chunks of a stream that ends as it should."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return chunks


async def refusal(client: httpx.AsyncClient, path: str, *, status: int = 400, **body: Any) -> Any:
    """The error that answers a request."""
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


async def leave(app: ASGIApp, path: str, body: dict[str, Any], *, after: int) -> list[bytes]:
    """Sends a request, goes away when `after` pieces of the answer have come, and returns those pieces."""
    raw = json.dumps(body).encode()
    pieces: list[bytes] = []
    asked = False
    leaving = asyncio.Event()
    if after == 0:
        asyncio.get_running_loop().call_later(0.02, leaving.set)

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": raw, "more_body": False}
        await leaving.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            pieces.append(message["body"])
        if after and len(pieces) >= after:
            leaving.set()
            await asyncio.sleep(0)

    await app(post_scope(path), receive, send)
    return pieces


def post_scope(path: str) -> dict[str, Any]:
    """The scope of a request with a body of JSON, as the HTTP server makes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("api", 80),
        "client": ("127.0.0.1", 1),
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }
