"""The replicas that the client knows: which of them work, and what they are together."""

import asyncio

import msgspec
from model_facts import changed
from scripted_engine import NO_WORK, PARAMS, READY, Connect, Script, Two, all_of

from engine_core.config import Address
from engine_core.engine_stats import Rates
from engine_core.protocol import AddRequest, Dead, Drain, Failed, Progress, Ready, Tokens


async def test_the_end_of_the_last_replica_is_the_end(two: Two) -> None:
    client, first, second, both = two
    stream = client.submit([1], PARAMS, replica=1)
    first.send(Dead("out of order"))
    await both.until(lambda: both.state(0) == "out of order")
    assert not client.died.is_set()
    second.send(Dead("this one too"))
    async with asyncio.timeout(60):
        await client.died.wait()
        assert await all_of(stream) == [Failed(stream.id, 503, "this one too", "engine_given_up")]
    assert client.dead == "this one too"


async def test_a_replica_that_is_back_before_its_end_is_noticed_has_lost_its_requests(two: Two) -> None:
    client, first, second, both = two
    client.submit([2] * 200, PARAMS, replica=1)
    stream = client.submit([1], PARAMS)
    await first.received(1)
    await both.start(0)  # on a connection of its own, while the first one seems to be there
    requests = await second.received(2)
    assert isinstance(requests[1], AddRequest) and requests[1].id == stream.id
    both.end(first)
    await asyncio.sleep(0.05)  # in which its end would be noticed
    assert both.state(0) == "works"


async def test_of_two_with_one_number_only_the_later_is_heard(two: Two) -> None:
    client, first, _, both = two
    later = await both.start(0, max_num_seqs=3)
    await both.until(lambda: client.ready is not None and client.ready.worker.max_num_seqs == 7)
    stream = client.submit([1], PARAMS, replica=0)
    first.answer(stream, 6, finish="stop")
    first.send(Dead("by mistake"))
    await asyncio.sleep(0.05)  # in which its message would arrive
    later.answer(stream, 5, finish="length")
    assert await all_of(stream) == [Tokens(id=stream.id, tokens=[5], finish="length")]
    both.end(later)
    await both.until(lambda: both.state(0) == "the engine process ended while serving")


async def test_together_they_can_do_what_each_of_them_can(connect: Connect) -> None:
    both = connect(2)
    changes: list[Ready | None] = []
    both.client.on_change = lambda: changes.append(both.client.ready)
    first = await both.start(0, max_model_len=80)
    await both.start(1, max_model_len=60, max_num_seqs=2)
    ready = both.client.ready
    assert ready is not None
    worker = ready.worker
    assert (worker.max_model_len, worker.max_num_seqs, worker.num_blocks) == (60, 6, 2000)
    both.end(first)
    await both.until(lambda: both.state(0) != "works")
    assert [one.worker.max_model_len for one in changes if one is not None] == [80, 60, 60]
    assert changes[-1] is not None and changes[-1].worker.max_num_seqs == 2


async def test_numbers_of_all_are_summed(two: Two) -> None:
    client, first, second, both = two
    rates = Rates(prompt_rate=1000.0, step=0.01, step_rows=8, step_prompts=100.0, stop_rate=0.02)
    work = {"running": 1, "waiting": 2, "kv_usage": 0.5, "busy": 1.5, "expected_wait": 4.0}
    stats = msgspec.structs.replace(NO_WORK, rates=rates, **work)
    first.send(stats)
    second.send(msgspec.structs.replace(stats, kv_usage=0.0, expected_wait=3.0))
    await both.until(lambda: all(one.stats is not None for one in client.replicas))
    assert client.stats is not None
    assert (client.stats.running, client.stats.waiting, client.stats.kv_usage) == (2, 4, 0.25)
    assert (client.stats.busy, client.stats.expected_wait) == (3.0, 3.0), "the shortest wait"
    assert client.stats.rates == Rates(2000.0, 0.01, 16, 200.0, 0.02), "twice as fast"


async def test_what_is_no_replica_of_the_others_is_sent_away(address: Address, connect: Connect) -> None:
    both = connect(2)
    await both.start(0)
    script = Script(address, 1)
    both.scripts.append(script)
    script.send(changed(READY, vocab_size=51))
    assert await script.received(1) == [Drain(seconds=0)]
    assert (
        both.state(1) == "it is not a replica of the others: its vocab_size is 51, and that of the others 50"
    )


async def test_a_number_that_nobody_may_have_is_passed_over(address: Address, connect: Connect) -> None:
    both = connect(2)
    stranger = Script(address, 2)
    both.scripts.append(stranger)
    stranger.send(READY)
    await both.start(0)
    assert [one.number for one in both.client.replicas] == [0, 1]


async def test_progress_is_that_of_the_first_and_tells_of_each(address: Address, connect: Connect) -> None:
    both = connect(3)
    for number, stage in ((0, "import"), (1, "weights")):
        script = Script(address, number)
        both.scripts.append(script)
        script.send(Progress(phase=stage, fraction=0.5, folder="/here", detail="rank 1 last" * number))
        await both.until(lambda stage=stage: both.client.progress.phase == stage)
    assert both.client.progress.fraction == 0.5
    assert both.client.progress.detail == (
        "replica 0: import 50%, replica 1: weights 50% (rank 1 last), replica 2 starts"
    )
    assert both.client.folder == "/here"


async def test_replicas_that_compute_other_bits_have_no_fingerprint(connect: Connect) -> None:
    both = connect(2)
    found: list[str] = []
    both.client.on_change = lambda: found.extend(
        [] if both.client.ready is None else [both.client.ready.worker.fingerprint]
    )
    await both.start(0, fingerprint="fp_1")
    again = await both.start(1, fingerprint="fp_1", max_num_seqs=3)
    assert set(found) == {"fp_1"}
    both.end(again)
    await both.until(lambda: both.state(1) != "works")
    await both.start(1, fingerprint="fp_2")
    assert found[-1] == ""
