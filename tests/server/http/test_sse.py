"""Answers that end early when their client goes away."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

import msgspec
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from server.errors import Unavailable
from server.http import sse
from server.http.sse import ClientWatch

T = TypeVar("T")


class Client:
    """A client that sends nothing until it goes away."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.watched = 0

    async def receive(self) -> Any:
        self.watched += 1
        await self.left.wait()
        return {"type": "http.disconnect"}


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    with ClientWatch(receive):
        return await work


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "WATCH_AFTER", 0.005)


async def test_quick_work_costs_no_task_and_no_watch() -> None:
    client = Client()

    async def work() -> int:
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert await while_connected(client.receive, work()) == len(asyncio.all_tasks())
    assert client.watched == 0


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    client = Client()
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(0.01)
            client.left.set()
            await asyncio.sleep(60)
        finally:
            ended = True

    with pytest.raises(ClientDisconnect):
        await while_connected(client.receive, work())
    assert ended
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()  # the cancellation does not reach what follows
    assert asyncio.all_tasks() == {task}


async def test_a_client_that_left_before_anybody_watched() -> None:
    client = Client()
    client.left.set()
    with pytest.raises(ClientDisconnect):
        await while_connected(client.receive, asyncio.sleep(60))


async def test_long_work_ends_with_its_result_or_its_error() -> None:
    client = Client()
    assert await while_connected(client.receive, asyncio.sleep(0.02, "done")) == "done"

    async def fail() -> None:
        await asyncio.sleep(0.02)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await while_connected(client.receive, fail())
    assert client.watched == 2
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_whoever_cancels_from_outside_is_obeyed() -> None:
    client = Client()
    task = asyncio.create_task(while_connected(client.receive, asyncio.sleep(60)))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


class Told(msgspec.Struct):
    text: str


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_stream_of_named_events_has_its_own_form(breaks: bool) -> None:
    ended = False
    sent: list[Any] = []

    async def generate() -> AsyncGenerator[bytes]:
        nonlocal ended
        yield sse.named_event("begin", Told("a"))
        if breaks:
            raise Unavailable("gone")
        ended = True
        yield sse.named_event("end", Told("b"))

    async def send(message: Any) -> None:
        sent.append(message)

    form = sse.StreamForm(lambda data: ended, lambda error: f"error: {error}".encode())
    await sse.EventStream(generate(), form=form)({}, Client().receive, send)
    assert [(message["body"], message["more_body"]) for message in sent[1:]] == [
        (b'event: begin\ndata: {"text":"a"}\n\n', True),
        (b"error: gone" if breaks else b'event: end\ndata: {"text":"b"}\n\n', False),
    ]
