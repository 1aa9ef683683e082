"""Requests that lose their places to others, from admission to the error that the client gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from fake_client import FakeClient
from reading import beginning, started

from server.access.client_identity import Caller
from server.errors import TooManyRequests
from server.frontend.frontend import Frontend
from server.requests.pooling import Item
from server.requests.sampling import SamplingParams
from worker.protocol import Pooling

GetReady = Callable[..., Awaitable[Frontend]]


async def test_a_request_whose_places_others_get_ends_with_an_error(
    client: FakeClient, ready: GetReady
) -> None:
    frontend = await ready("--max-num-queued-reqs", "0")
    busy, other = Caller("busy"), Caller("other")
    first = frontend.admissions.admit(busy, 2)
    generation = await started(frontend.generate([1], SamplingParams(n=2), admission=first))
    second = frontend.admissions.admit(busy, 2)
    pooling = await beginning(frontend.pool([Item([1], Pooling(task="embed"))] * 2, admission=second))
    late = frontend.admissions.admit(other, 1)
    with pytest.raises(TooManyRequests, match="newest of your requests") as caught:
        await pooling
    assert caught.value.headers()["Retry-After"] == "5"
    assert client.aborted == [3, 4] and not generation.done()
    assert frontend.live == 3
    late.release()
    client.submitted[0].say([5], finish="length")
    client.submitted[1].say([5], finish="length")
    assert len(await generation) == 2
    assert "admission_rejections_total{" in frontend.metrics.page().decode()


async def test_a_request_that_lost_its_places_before_it_was_sent_is_not_sent(
    client: FakeClient, ready: GetReady
) -> None:
    frontend = await ready("--max-num-queued-reqs", "0")
    mine = frontend.admissions.admit(Caller("busy"), 4)
    frontend.admissions.admit(Caller("other"), 1)
    with pytest.raises(TooManyRequests):
        frontend.generate([1], SamplingParams(n=4), admission=mine)
    with pytest.raises(TooManyRequests):
        await frontend.pool([Item([1], Pooling(task="embed"))] * 2, admission=mine)
    assert not client.submitted
