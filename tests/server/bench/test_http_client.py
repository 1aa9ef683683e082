"""The client of the load generator: connections that are kept, answers in any pieces, ends of any kind."""

import asyncio

import pytest
from scripted_server import LAST, STREAM, Request, part, says, scripted, whole

from server.bench.http_client import Client, TransportError
from server.bench.serve_options import BenchError


async def post(client: Client, body: bytes = b"{}") -> tuple[int, bytes]:
    got = bytearray()
    status = await client.post("/v1/completions", body, got.extend)
    return status, bytes(got)


async def test_one_connection_serves_one_request_after_the_other() -> None:
    async with scripted(says(whole({"a": 1}))) as server:
        client = Client(server.url)
        assert [await post(client) for _ in range(3)] == [(200, b'{"a": 1}')] * 3
        client.close()
    assert server.connections == 1


async def test_requests_at_once_have_a_connection_each() -> None:
    async with scripted(says(whole({}))) as server:
        client = Client(server.url)
        await asyncio.gather(*(post(client) for _ in range(4)))
        await asyncio.gather(*(post(client) for _ in range(4)))
        client.close()
    assert server.connections == 4


async def test_what_is_sent_is_what_was_meant() -> None:
    async with scripted(says(whole({}))) as server:
        client = Client(f"{server.url}/root/v1/", "secret")
        await post(client, b'{"x": 2}')
        await client.get("/v1/models")
        client.close()
    sent, asked = server.requests
    assert sent.path == "/root/v1/completions"
    assert sent.json == {"x": 2}
    assert sent.headers["authorization"] == "Bearer secret"
    assert sent.headers["content-type"] == "application/json"
    assert sent.headers["host"] == f"127.0.0.1:{server.port}"
    assert (asked.path, asked.body) == ("/root/v1/models", b"")


async def test_a_chunked_body_may_be_cut_anywhere() -> None:
    answer = STREAM + part(b"one ") + part(b"two") + LAST
    async with scripted(says(*(answer[i : i + 1] for i in range(len(answer))))) as server:
        client = Client(server.url)
        assert await post(client) == (200, b"one two")
        assert await post(client) == (200, b"one two")
        client.close()
    assert server.connections == 1


async def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    async def reply(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(whole({}))
        await writer.drain()
        writer.close()

    async with scripted(reply) as server:
        client = Client(server.url)
        assert (await post(client))[0] == 200
        await asyncio.sleep(0.01)
        assert (await post(client))[0] == 200
        client.close()
    assert server.connections == 2


async def test_a_server_that_asks_to_close_is_left() -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    async with scripted(says(closing)) as server:
        client = Client(server.url)
        assert [await post(client) for _ in range(2)] == [(200, b"{}")] * 2
        client.close()
    assert server.connections == 2


async def break_off(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM + part(b"half"))
    await writer.drain()
    writer.close()


async def stay_silent(request: Request, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def talk_nonsense(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SMTP ready\r\n\r\n")


@pytest.mark.parametrize(
    ("reply", "timeout", "kind"),
    [
        (break_off, 60, "connection closed"),
        (stay_silent, 0.1, "timeout"),
        (talk_nonsense, 60, "the answer is not HTTP"),
    ],
)
async def test_every_end_but_a_good_one_has_a_name(reply, timeout: float, kind: str) -> None:
    async with scripted(reply) as server:
        client = Client(server.url, timeout=timeout)
        with pytest.raises(TransportError, match=kind):
            await post(client)
        client.close()


async def test_nobody_listens() -> None:
    async with scripted(says()) as server:
        url = server.url
    with pytest.raises(TransportError, match="connection refused"):
        await post(Client(url))


@pytest.mark.parametrize("url", ["ftp://host", "http://", "unix:///tmp/socket"])
def test_an_address_must_be_one(url: str) -> None:
    with pytest.raises(BenchError, match="not the address of a server"):
        Client(url)
