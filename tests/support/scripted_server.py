"""A server in this process that answers byte for byte what a test has written."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Reply = Callable[["Request", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)


@dataclass
class FakeServer:
    reply: Reply
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most_running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while request := await _read(reader):
                self.requests.append(request)
                self.running += 1
                self.most_running = max(self.running, self.most_running)
                try:
                    await self.reply(request, writer)
                finally:
                    self.running -= 1
                if writer.is_closing():
                    return
        except ConnectionError:
            pass
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(first.split()[1], headers, body)


def whole(body: object, status: int = 200) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def part(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(message: object) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def text(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}], "usage": None})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = b"data: [DONE]\n\n"


def says(*pieces: bytes) -> Reply:
    """A reply that is always the same bytes, each piece in a packet of its own."""

    async def reply(request: Request, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return reply


MODELS = whole({"data": [{"id": "first"}, {"id": "second"}]})


async def completes(request: Request, writer: asyncio.StreamWriter) -> None:
    """A reply with as many tokens as were asked for, all in one chunk."""
    if request.path == "/v1/models":
        writer.write(MODELS)
        return
    if request.path == "/metrics":
        writer.write(whole({}, 404))
        return
    asked = request.json
    if request.path == "/v1/embeddings":
        tokens = sum(len(one) for one in asked["input"])
        writer.write(whole({"data": [], "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}))
        return
    await asyncio.sleep(0.002)
    spoken = text("a") if "prompt" in asked else event({"choices": [{"delta": {"content": "a"}}]})
    ending = usage(len(asked.get("prompt", "")), asked["max_tokens"])
    writer.write(STREAM + part(spoken) + part(ending + DONE) + LAST)


@asynccontextmanager
async def scripted(reply: Reply) -> AsyncIterator[FakeServer]:
    fake = FakeServer(reply)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    async with server:
        yield fake
