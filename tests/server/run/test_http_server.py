"""uvicorn's server as we use it: when it stops listening, which connections it waits for, what it logs."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_client import FakeClient
from live import PATIENCE

from server.frontend.frontend import Frontend
from server.http.middleware import AccessLog
from server.run.commands import bind
from server.run.http_server import HttpServer

Serve = Callable[..., Awaitable[tuple[HttpServer, tuple[str, int]]]]

LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
COMPLETION = b'{"prompt": [1], "max_tokens": 1}'
COMPLETE = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(COMPLETION), COMPLETION)
)


async def head_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(60):
        return await reader.readuntil(b"\r\n\r\n")


async def test_idle_connections_are_closed_at_the_end_and_others_after_their_answer(
    serve: Serve, client: FakeClient
) -> None:
    server, address = await serve()
    idle, idle_writer = await asyncio.open_connection(*address)
    busy, busy_writer = await asyncio.open_connection(*address)
    idle_writer.write(LIVE)
    assert b"200 OK" in await head_of(idle)
    await idle.readexactly(len(b'{"state":"live"}'))
    busy_writer.write(COMPLETE)
    async with asyncio.timeout(60):
        while not client.submitted:
            await asyncio.sleep(0)
    server.end()
    async with asyncio.timeout(60):
        assert await idle.read() == b""
        assert not busy.at_eof()
        client.submitted[0].say([9], finish="length")
        answer = await busy.read()
    assert b"200 OK" in answer  # older versions of uvicorn end the connection without saying so before
    for writer in (idle_writer, busy_writer):
        writer.close()


@pytest.mark.parametrize("root", ["/llm", "/api"])
async def test_a_proxy_may_take_the_root_path_away_or_leave_it(serve: Serve, root: str) -> None:
    _, address = await serve("--root-path", root, "--api-key", "k")
    reader, writer = await asyncio.open_connection(*address)

    async def status(path: str, *headers: str) -> int:
        lines = (f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", "")
        writer.write("\r\n".join(lines).encode())
        head = await head_of(reader)
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        return int(head.split()[1])

    for path in ("/v1/models", "/api/tags"):  # Ollama's begins as the second root
        for asked in (path, f"{root}{path}", f"{root}{path}?a=b"):
            assert [await status(asked), await status(asked, "x-api-key: k")] == [401, 200], asked
    assert [await status("/live"), await status(f"{root}/live")] == [200, 200]
    for other in ("/v1/models", "/models"):
        assert await status(f"{root}s{other}", "x-api-key: k") == 404
    writer.close()


async def test_who_has_just_connected_gets_an_answer_at_the_end(serve: Serve) -> None:
    server, address = await serve()
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(60):
        while not server.server_state.connections:
            await asyncio.sleep(0)
    began = time.monotonic()
    server.end()
    await asyncio.sleep(0.01)
    writer.write(LIVE)
    assert b"200 OK" in await head_of(reader)
    assert time.monotonic() - began < 2 * PATIENCE
    writer.close()


async def test_open_connections_are_served_after_the_port_is_left_to_others(serve: Serve) -> None:
    server, address = await serve()
    reader, writer = await asyncio.open_connection(*address)
    writer.write(LIVE)
    await head_of(reader)
    server.stop_listening()
    await asyncio.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    await reader.readexactly(len(b'{"state":"live"}'))
    writer.write(LIVE)
    assert b"200 OK" in await head_of(reader)
    writer.close()


@pytest.mark.parametrize(
    ("path", "logged"), [("/health?deep=1", False), ("/health", False), ("/v1/models", True)]
)
def test_requests_for_quiet_paths_are_not_logged(
    path: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        AccessLog({"/health"}).info("%s %s %s %s %d", "1.1.1.1:1", "GET", path, "1.1", 200)
    assert bool(caplog.messages) is logged


async def test_clients_of_a_unix_socket_have_a_name_in_the_log(
    ready: Callable[..., Awaitable[Frontend]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frontend = await ready("--uds", str(tmp_path / "s"))
    listener = bind(frontend.config)
    server = HttpServer(frontend.config, frontend)
    log = logging.getLogger("uvicorn.access")
    log.addHandler(caplog.handler)  # whoever has set up uvicorn's own logs keeps them from the others
    try:
        with caplog.at_level(logging.INFO):
            task = asyncio.create_task(server.serve([listener]))
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(LIVE)
            assert b"200 OK" in await head_of(reader)
            writer.close()
            server.end()
            await task
    finally:
        log.removeHandler(caplog.handler)
    assert 'unix - "GET /live HTTP/1.1" 200' in caplog.messages
