"""A server of HTTP in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio

from server.frontend.frontend import Frontend
from server.run.commands import bind
from server.run.http_server import HttpServer

Serve = Callable[..., Awaitable[tuple[HttpServer, tuple[str, int]]]]


@pytest_asyncio.fixture
async def serve(ready: Callable[..., Awaitable[Frontend]]) -> AsyncIterator[Serve]:
    """A function that begins to serve, and returns the server and its address."""
    serving: list[tuple[HttpServer, asyncio.Task[None]]] = []

    async def begin(*flags: str) -> tuple[HttpServer, tuple[str, int]]:
        frontend = await ready("--port", "0", *flags)
        listener = bind(frontend.config)
        address = listener.getsockname()
        server = HttpServer(frontend.config, frontend)
        serving.append((server, asyncio.create_task(server.serve([listener]))))
        async with asyncio.timeout(60):
            while not server.started:
                await asyncio.sleep(0)
        return server, address

    yield begin
    for server, task in serving:
        server.end()
        await task
