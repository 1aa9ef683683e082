"""The engine in a process of its own, on real sockets, with a worker that has no tensors."""

import asyncio
import os
import resource
import signal
import stat
import time
from pathlib import Path

import pytest
from fake_worker import (
    LOSES_DEVICE,
    SLOW_STEP,
    reference,
)
from live import PATIENCE, alive
from started_engines import Start, collect, first, soon, text, until

from engine_core.client.client import EngineClient
from engine_core.protocol import Failed, Progress, Tokens
from engine_core.reason_codes import DEADLINE
from engine_core.restarts import exit_of, keep_engines
from engine_core.wire.transport import ServerEnd
from models import plugins
from worker.protocol import Sampling

# Nothing goes wrong.


async def test_the_start_is_told_stage_by_stage(start: Start, model: Path) -> None:
    told: list[Progress] = []
    engines, client = await start(ready=False, on_progress=told.append)
    await soon(client.folder_known.wait())
    assert client.folder == str(model)
    await soon(client.ready_or_dead.wait())
    assert client.ready is not None and client.ready.vocab_size == 50
    assert [progress.phase for progress in told] == ["import", "weights", "cache", "warmup"]
    assert stat.S_IMODE(os.stat(engines.run_folder).st_mode) == 0o700


async def test_requests_are_read_while_a_step_runs(start: Start) -> None:
    _, client = await start()
    slow = client.submit([SLOW_STEP], Sampling(max_tokens=1))
    refused = client.submit([60], Sampling(max_tokens=1))
    gone = client.submit([3], Sampling(max_tokens=1))
    client.abort([gone.id])
    first_done = asyncio.create_task(collect(slow))
    (failed,) = await collect(refused)
    assert isinstance(failed, Failed) and failed.code == 400
    assert not first_done.done()
    assert text(await first_done) == reference([SLOW_STEP], 1)


async def test_two_servers_share_an_engine_and_one_may_vanish(start: Start) -> None:
    engines, client = await start(api_servers=2, max_num_seqs=1)
    other = EngineClient(engines.addresses[1])
    await soon(other.ready_or_dead.wait())
    running = other.submit([5], Sampling(max_tokens=100))
    await first(running)
    waiting = client.submit([6], Sampling(max_tokens=3))
    other.close()
    assert text(await collect(waiting)) == reference([6], 3)
    # A server in its place is greeted and served.
    another = EngineClient(engines.addresses[1])
    await soon(another.ready_or_dead.wait())
    assert text(await collect(another.submit([7], Sampling(max_tokens=3)))) == reference([7], 3)
    another.close()


async def test_an_idle_engine_uses_no_time(start: Start) -> None:
    engines, client = await start()
    await collect(client.submit([1], Sampling(max_tokens=2)))
    await soon(uses_no_time(engines.engines[0].process.pid), seconds=30)


async def test_an_engine_whose_readers_have_stopped_uses_no_time(start: Start) -> None:
    engines, client = await start()
    stream, other = client.submit([1], Sampling(max_tokens=100)), client.submit([2], Sampling(max_tokens=9))
    await first(stream)
    client.pause([stream.id])
    await collect(other)
    await soon(uses_no_time(engines.engines[0].process.pid), seconds=30)
    assert stream.id  # its tokens so far are kept
    client.resume([stream.id])
    last = (await collect(stream))[-1]
    assert isinstance(last, Tokens) and last.finish == "length"


async def uses_no_time(pid: int) -> None:
    """Wait for half a second in which a process does nothing: on a busy machine it ends its work late."""
    spent = 1.0
    while spent > 1 / os.sysconf("SC_CLK_TCK"):
        before = cpu_seconds(pid)
        await asyncio.sleep(0.5)
        spent = cpu_seconds(pid) - before


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Engines are asked to end.


async def test_drain_finishes_what_runs_and_exits_with_0(start: Start) -> None:
    engines, client = await start()
    stream = client.submit([1, 2], Sampling(max_tokens=60))
    await first(stream)
    client.drain(10)
    late = client.submit([3], Sampling(max_tokens=3))
    outputs = await collect(stream)
    assert isinstance(outputs[-1], Tokens) and outputs[-1].finish == "length"
    (refused,) = await collect(late)
    assert isinstance(refused, Failed) and refused.code == 503
    await soon(client.died.wait())
    assert await exit_of(engines.engines[0].process) == 0


@pytest.mark.parametrize("reads", [True, False])
async def test_sigterm_gives_the_time_that_was_agreed_and_no_more(start: Start, reads: bool) -> None:
    engines, client = await start(drain_seconds=0.1 if reads else 0.5)
    stream = client.submit([1, 2], Sampling(max_tokens=120))
    await first(stream)
    if not reads:
        client.pause([stream.id])
    engines.engines[0].process.terminate()
    if reads:
        outputs = await collect(stream)
        assert isinstance(outputs[-1], Tokens) and outputs[-1].finish == "abort"
    await soon(exit_of(engines.engines[0].process), 20)
    assert engines.engines[0].exit_code == 0


async def test_a_second_sigterm_does_not_wait(start: Start) -> None:
    engines, client = await start(drain_seconds=60)
    stream = client.submit([1, 2], Sampling(max_tokens=120))
    await first(stream)
    engines.engines[0].process.terminate()
    await soon(until(lambda: client.replicas[0].leaving))
    engines.engines[0].process.terminate()
    await soon(exit_of(engines.engines[0].process), 20)
    assert isinstance((await collect(stream))[-1], Failed)


# Engines and clients fail.


async def test_a_killed_engine_ends_every_stream_once(start: Start) -> None:
    engines, client = await start(max_num_seqs=2)
    streams = [client.submit([n], Sampling(max_tokens=100)) for n in range(6)]
    await first(streams[0])
    engines.engines[0].process.kill()
    began = time.monotonic()
    for outputs in await asyncio.gather(*map(collect, streams)):
        assert [output.code for output in outputs if isinstance(output, Failed)] == [503]
        assert isinstance(outputs[-1], Failed)
    assert time.monotonic() - began < 1 * PATIENCE
    assert await exit_of(engines.engines[0].process) == -signal.SIGKILL
    (refused,) = await collect(client.submit([1], Sampling(max_tokens=1)))
    assert isinstance(refused, Failed) and refused.code == 503


async def test_a_lost_device_ends_the_process_with_1(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    engines, client = await start()
    (failed,) = await collect(client.submit([LOSES_DEVICE], Sampling(max_tokens=3)))
    assert isinstance(failed, Failed) and failed.code == 503
    assert await exit_of(engines.engines[0].process) == 1
    assert capfd.readouterr().err.splitlines()[-1] == f"error: {client.dead}"


async def test_a_start_that_fails_says_why_in_one_line_and_exits_with_2(
    start: Start, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (model / "no-weights").touch()
    engines, client = await start(ready=False)
    await soon(client.ready_or_dead.wait())
    assert client.dead == "model.safetensors: tensor 'lm_head.weight' is missing" and client.explained
    assert await exit_of(engines.engines[0].process) == 2
    assert capfd.readouterr().err.splitlines()[-1] == f"error: {client.dead}"


async def test_sigterm_while_loading_exits_at_once(start: Start) -> None:
    engines, client = await start(ready=False, hf_overrides={"slow": True})
    await soon(until(lambda: client.progress.phase == "weights"))
    engines.engines[0].process.terminate()
    await soon(exit_of(engines.engines[0].process), 20)
    assert client.ready is None and engines.engines[0].exit_code == 0


async def test_the_end_of_an_engine_is_known_without_a_connection(start: Start) -> None:
    engines, client = await start(ready=False, restart_wait=1.0)
    engines.engines[0].process.kill()  # before it has connected
    await soon(keep_engines(engines, client))
    assert client.dead and client.dead.startswith("the engine process ended while starting: it was ended by")


async def test_unreadable_and_too_long_frames_are_dropped(start: Start) -> None:
    engines, client = await start(api_servers=2)
    other = ServerEnd(engines.addresses[1])
    names = list[bytes]()

    def greeted() -> bool:
        names.extend(frame.bytes for frame, _ in other.greetings.read_with_frames())
        return bool(names)

    await soon(until(greeted))
    for frame in (b"", b"\xc1", b"\x81\xa4type\xa3Add", os.urandom(1000), b"\x93" * 100_000):
        other.greetings.sock.send_multipart([names[0], frame])
    assert text(await collect(client.submit([2], Sampling(max_tokens=3)))) == reference([2], 3)
    other.greetings.sock.send_multipart([names[0], bytes(65 << 20)])  # beyond the limit
    assert text(await collect(client.submit([2], Sampling(max_tokens=3)))) == reference([2], 3)
    assert resident_mb(engines.engines[0].process.pid) < 150
    (refused,) = await collect(client.submit([2**62] * (8 << 20), Sampling(max_tokens=3)))
    assert isinstance(refused, Failed) and refused.code == 400
    other.close()


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


async def test_an_engine_knows_the_classes_that_the_program_has_registered(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_beside_the_program.py").write_text("class Writer:\n    def logits(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_classes", {"WriterModel": "module_beside_the_program:Writer"})
    _, client = await start(runner="generate", hf_overrides={"architectures": ["WriterModel"]})
    assert client.ready is not None and client.ready.architecture == "WriterModel"


async def test_ranks_in_processes_of_their_own_serve_and_end_with_their_engine(
    start: Start, model: Path
) -> None:
    engines, client = await start(module="fake_spread")
    assert text(await collect(client.submit([2, 3], Sampling(max_tokens=6)))) == reference([2, 3], 6)
    pids = [int((model / f"pid-{rank}").read_text()) for rank in (0, 1)]
    engines.engines[0].process.kill()
    await soon(until(lambda: not any(alive(pid) for pid in pids)))


async def test_requests_end_in_time_though_nothing_else_happens(start: Start) -> None:
    """The engine waits for a step, or for a reader, and wakes for a deadline nevertheless."""
    _, client = await start()
    slow = client.submit([SLOW_STEP, 4], Sampling(max_tokens=2), budget=0.05)
    paused = client.submit([3, 4], Sampling(max_tokens=200), budget=0.2)
    client.pause([paused.id])
    for stream in (slow, paused):
        last = (await collect(stream))[-1]
        assert isinstance(last, Failed) and last.error == DEADLINE
    assert client.open_streams == 0
    assert text(await collect(client.submit([2, 3], Sampling(max_tokens=6)))) == reference([2, 3], 6)
