"""A request on its way: what another replica is asked for when the one that has it ends."""

import asyncio
import time

import pytest
from model_facts import changed
from msgspec.structs import replace
from scripted_engine import READY, Connect, all_of, next_of

from engine_core.client.in_flight import InFlight, Stream, can_go_on, take_back
from engine_core.client.replica import Replica
from engine_core.protocol import AddRequest, Failed, Outputs, Ready, Tokens
from worker.protocol import Sampling

ASKED = AddRequest(7, [1, 2, 3], Sampling(max_tokens=20, prompt_logprobs=1, logprobs=2), sent=5.0)


def working(ready: Ready = READY) -> Replica:
    replica = Replica(0)
    replica.begin_work(ready)
    return replica


async def in_flight(add: AddRequest = ASKED) -> InFlight:
    one = InFlight(add, Stream(add.id, asyncio.get_running_loop()))
    one.assign(working(), 3)
    return one


async def test_what_had_begun_goes_on_behind_its_tokens_and_tells_nothing_twice() -> None:
    one = await in_flight()
    one.start()
    one.emitted.extend([8, 9])
    began = one.began
    take_back(one)
    params = Sampling(max_tokens=20, logprobs=2)
    assert one.add == AddRequest(7, [1, 2, 3, 8, 9], params, sent=5.0, prompt_len=3, began=began)
    one.assign(working(), 5)
    one.start()
    one.emitted.extend([4])
    take_back(one)
    assert one.add == AddRequest(7, [1, 2, 3, 8, 9, 4], params, sent=5.0, prompt_len=3, began=began)
    assert ASKED.tokens == [1, 2, 3]


async def test_what_is_left_of_its_time_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that shares the clock counts from `sent`; another one is told what is left."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    near = await in_flight(replace(ASKED, wait=8.0, budget=20.0))
    far = await in_flight(replace(ASKED, wait=8.0, budget=20.0, sent=0.0))
    now += 5
    for one in (near, far):
        take_back(one)
    assert (near.add.wait, near.add.budget, near.add.sent) == (8.0, 20.0, 5.0)
    assert (far.add.wait, far.add.budget) == (3.0, 15.0)
    assert near.seconds_left == far.seconds_left == 3.0
    now += 5
    take_back(far)
    assert 0 < far.add.wait < 0.01 and far.add.budget == 10.0
    far.start()
    far.emitted.extend([8])
    assert far.seconds_left == 10.0
    now += 20
    take_back(far)
    assert 0 < far.add.budget < 0.01


async def test_times_of_a_far_clock_are_not_told() -> None:
    one = await in_flight(replace(ASKED, sent=0.0))
    one.start()
    one.emitted.extend([8])
    take_back(one)
    assert one.add.began == 0.0


async def test_a_load_is_the_prompt_until_it_is_read_again() -> None:
    one = await in_flight()
    replica = one.replica
    assert replica is not None
    one.start()
    read = replica.tokens
    one.emitted.extend([8])
    take_back(one)
    assert (replica.tokens, replica.requests) == (0, 0)
    one.assign(replica, 400)
    assert replica.tokens == 400
    one.start()
    assert replica.tokens == read


async def test_only_an_engine_that_gives_the_same_bits_goes_on() -> None:
    one = await in_flight()
    one.replica = working(changed(READY, fingerprint="fp_1", max_model_len=60))
    others = {
        name: changed(READY, **{"fingerprint": "fp_1", "max_model_len": 60, **facts}).worker
        for name, facts in {
            "same": {"num_blocks": 7},
            "other bits": {"fingerprint": "fp_2"},
            "longer": {"max_model_len": 100},
            "ends earlier": {"max_model_len": 22},
        }.items()
    }
    assert all(can_go_on(one, facts) for facts in others.values()), "it has not begun"
    one.start()
    one.emitted.extend([8])
    assert [name for name, facts in others.items() if can_go_on(one, facts)] == ["same", "longer"]


async def test_an_answer_waits_for_an_engine_of_the_same_bits(connect: Connect) -> None:
    both = connect(2, restart_wait=60)
    first, second = await both.start(0, fingerprint="fp_1"), await both.start(1, fingerprint="fp_2")
    both.client.submit([2] * 200, Sampling(max_tokens=5), replica=1)
    stream = both.client.submit([1], Sampling(max_tokens=5))
    await second.received(1)
    await first.received(1)
    first.answer(stream, 8)
    await both.until(lambda: both.client.replicas[0].tokens != 1)
    both.client.engine_exited(0, -9)
    both.end(first)
    again = await both.start(0, fingerprint="fp_1")
    [add] = await again.received(1)
    assert isinstance(add, AddRequest) and (add.id, add.tokens, add.prompt_len) == (stream.id, [1, 8], 1)


async def test_an_engine_that_cannot_go_on_is_not_the_client_s_fault(connect: Connect) -> None:
    found = connect(restart_wait=60)
    first = await found.start(0)
    stream = found.client.submit([1], Sampling(max_tokens=5))
    await first.received(1)
    first.answer(stream, 8)
    assert await next_of(stream) == Tokens(id=stream.id, tokens=[8])
    found.client.engine_exited(0, -9)
    found.end(first)
    again = await found.start(0)
    await again.received(1)
    again.send(Outputs([Failed(stream.id, 400, "prompt and max_tokens need 9 blocks")]))
    [failed] = await all_of(stream)
    assert isinstance(failed, Failed) and failed.code == 503
