"""Engine processes that are killed, and started again, while requests run; one that kills them is found."""

import asyncio

import pytest
from fake_worker import HANGS_STEP, KILLS_PROCESS, reference
from started_engines import Keep, collect, first, soon, text, until

from engine_core.protocol import Failed
from engine_core.reason_codes import QUARANTINED
from worker.protocol import Sampling


async def test_answers_go_on_where_a_killed_engine_stopped(keep: Keep) -> None:
    engines, client, ends = await keep(max_num_seqs=4)
    streams = [client.submit([n], Sampling(max_tokens=100)) for n in range(8)]
    for stream in (streams[0], streams[7]):
        await first(stream)
        before = len(ends.exits)
        engines.engines[0].process.kill()
        await soon(until(lambda before=before: len(ends.exits) > before))
    for n, outputs in enumerate(await asyncio.gather(*map(collect, streams))):
        rest = text(outputs)
        assert rest and rest == reference([n], 100)[-len(rest) :], "what was read before is not there"
        assert n in (0, 7) or len(rest) == 100


@pytest.mark.parametrize(("fault", "replicas"), [(KILLS_PROCESS, 1), (KILLS_PROCESS, 2), (HANGS_STEP, 1)])
async def test_one_that_kills_or_hangs_is_found_in_three_restarts(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, fault: int, replicas: int
) -> None:
    if fault == HANGS_STEP:
        monkeypatch.setattr("engine_core.stalls.STALL_SECONDS", 1.5)
        monkeypatch.setattr("engine_core.stalls.KILL_SECONDS", 3.0)
    _, client, ends = await keep(max_num_seqs=16, replicas=replicas)
    await soon(until(lambda: sum(one.works for one in client.replicas) == replicas))
    streams = [client.submit([n], Sampling(max_tokens=40)) for n in range(15)]
    bad = client.submit([fault], Sampling(max_tokens=40))
    [failed] = await collect(bad)
    assert isinstance(failed, Failed) and (failed.code, failed.error) == (500, QUARANTINED)
    answers = await asyncio.gather(*map(collect, streams))
    assert [text(outputs) for outputs in answers] == [reference([n], 40) for n in range(15)]
    assert ends.codes == [-9] * 3
    [refused] = await collect(client.submit([fault], Sampling(max_tokens=40, seed=3)))
    assert isinstance(refused, Failed) and refused.error == QUARANTINED and ends.codes == [-9] * 3
