"""What engines tell of the token behind prompts: sent some at a time, in order, and ended together."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fake_client import FakeClient

from engine_core.protocol import Failed, Tokens
from server.access.client_identity import ANYONE
from server.frontend.frontend import Frontend
from worker.protocol import Sampling

ROW = Sampling(1, temperature=0.0, logprobs=0, told=(1, 2))
ROWS = [([1], ROW), ([2], ROW), ([3], ROW)]


async def sent(client: FakeClient, count: int) -> None:
    while len(client.submitted) < count:
        await asyncio.sleep(0)


async def test_answers_keep_the_order_of_prompts_and_failures_stand_among_them(
    frontend: Frontend, client: FakeClient
) -> None:
    admission = frontend.admissions.admit(ANYONE, 3)
    asked = frontend.engine_requests.tell(iter(ROWS), [1, 1, 1], admission, group=7)
    task = asyncio.create_task(asked)
    await sent(client, 3)
    assert {one.options.get("group") for one in client.submitted} == {7} and len(admission.streams) == 3
    first, second, third = client.submitted
    third.say([5], finish="length")
    second.fail(500, "it broke")
    first.say([], expected=2.0)  # the news that it waits
    first.say([4], finish="length")
    found = await task
    assert [each.tokens if isinstance(each, Tokens) else each.message for each in found] == [
        [4],
        "it broke",
        [5],
    ]
    assert not admission.streams


async def test_an_aborted_prompt_has_failed_and_a_cancelled_request_leaves_nothing(
    frontend: Frontend, client: FakeClient
) -> None:
    admission = frontend.admissions.admit(ANYONE, 2)
    task = asyncio.create_task(frontend.engine_requests.tell(iter(ROWS), [1, 1], admission))
    await sent(client, 2)
    client.submitted[0].say([], finish="abort")
    client.submitted[1].say([5], finish="length")
    ended, _ = await task
    assert isinstance(ended, Failed) and ended.code == 503
    task = asyncio.create_task(frontend.engine_requests.tell(iter(ROWS), [1, 1], admission))
    await sent(client, 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(client.aborted) >= {one.stream.id for one in client.submitted[2:]} and not admission.streams


async def test_long_prompts_are_sent_some_at_a_time(
    ready: Callable[..., Awaitable[Frontend]], client: FakeClient
) -> None:
    frontend = await ready()
    admission = frontend.admissions.admit(ANYONE, 3)
    long = [0] * (1 << 17)
    task = asyncio.create_task(
        frontend.engine_requests.tell(iter([(long, ROW)] * 2), [len(long)] * 2, admission)
    )
    await sent(client, 1)
    assert len(client.submitted) == 1
    client.submitted[0].say([5], finish="length")
    await sent(client, 2)
    client.submitted[1].say([6], finish="length")
    assert len(await task) == 2
