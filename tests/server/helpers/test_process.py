"""Helper processes: what they answer, what ends them, and that the next order is followed whatever did."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import helper_job
import pytest
from helper_job import JOB, Order, Setup, Told

from server.errors import ApiError
from server.helpers.job_queue import Helpers, JobQueue
from worker import child

pytestmark = pytest.mark.slow(3)

Open = Callable[..., Any]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setenv("PYTHONPATH", str(Path(helper_job.__file__).parent))

    @asynccontextmanager
    async def opened(greeting: str = "hi", **limits: Any) -> AsyncIterator[JobQueue[Told]]:
        helpers = Helpers()
        try:
            async with asyncio.timeout(60):
                yield helpers.open(replace(JOB, **limits), lambda: Setup(greeting))
        finally:
            helpers.close()

    return opened


async def refusal(queue: JobQueue[Told], do: str) -> tuple[int, str]:
    with pytest.raises(ApiError) as refused:
        await queue.ask(Order(do))
    return refused.value.status, refused.value.message


async def test_one_process_follows_order_after_order(opened: Open) -> None:
    async with opened() as queue:
        [process] = queue.processes
        assert process.pid is None  # before the first
        first = await queue.ask(Order(), b"abc")
        assert first == Told("hi 3 abc", process.pid or 0)
        assert await refusal(queue, "refuse") == (404, "there is none")
        assert await refusal(queue, "break") == (500, "Internal server error")
        assert (await queue.ask(Order(), bytes(5 << 20))).text == "hi 5242880 \0\0\0\0\0"
        assert process.pid == first.pid
    with pytest.raises(ProcessLookupError):
        os.kill(first.pid, 0)


async def test_it_can_start_before_the_first_order(opened: Open) -> None:
    async with opened() as queue:
        queue.start()
        while (pid := queue.processes[0].pid) is None:
            await asyncio.sleep(0.01)
        assert (await queue.ask(Order())).pid == pid


@pytest.mark.parametrize(
    ("do", "limits", "error"),
    [
        ("sleep", {"seconds": 0.3}, (404, "sleep 0.3 None")),
        ("compute", {"processor_seconds": 0.1}, (404, f"compute 30 {-signal.SIGPROF}")),
        ("hoard", {}, (400, "Reading this request took more memory than")),
        ("die", {}, (503, "The process that reads tests ended. Send")),
    ],
)
async def test_what_takes_too_much_fails_alone(
    opened: Open, do: str, limits: dict[str, float], error: tuple[int, str]
) -> None:
    async with opened(**limits) as queue:
        broken = asyncio.create_task(refusal(queue, do))
        await asyncio.sleep(0)
        after = [asyncio.create_task(queue.ask(Order())) for _ in range(3)]
        status, message = await broken
        assert (status, message[: len(error[1])]) == error
        assert len({told.pid for told in await asyncio.gather(*after)}) == 1


async def test_time_grows_with_the_bytes(opened: Open) -> None:
    async with opened(seconds=0.1, seconds_per_mib=0.1) as queue:
        with pytest.raises(ApiError, match=r"sleep 0\.3 None"):
            await queue.ask(Order("sleep"), bytes(2 << 20))


async def test_one_that_dies_without_an_order_is_replaced(opened: Open) -> None:
    async with opened() as queue:
        first = await queue.ask(Order())
        os.kill(first.pid, signal.SIGKILL)
        while queue.processes[0].pid is not None:
            await asyncio.sleep(0.01)
        assert (await queue.ask(Order())).pid != first.pid


async def test_one_that_keeps_memory_ends_by_itself(opened: Open) -> None:
    async with opened() as queue:
        first = await queue.ask(Order("keep"))
        assert (await queue.ask(Order())).pid != first.pid


async def test_one_that_cannot_start(
    opened: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened("exit") as queue:
        assert (await refusal(queue, "tell"))[0] == 503
        assert "the process for tests did not start: it exited with code 2" in caplog.text

    def broken(*_: object) -> None:
        raise OSError("no more processes")

    async with opened() as queue:
        with monkeypatch.context() as broke:
            broke.setattr(child, "start", broken)
            assert (await refusal(queue, "tell"))[0] == 503
        await queue.ask(Order())


async def test_what_is_open_ends_with_it(opened: Open) -> None:
    async with opened() as queue:
        pid = (await queue.ask(Order())).pid
        asked = [asyncio.create_task(refusal(queue, "sleep")) for _ in range(2)]
        await asyncio.sleep(0)
    assert {status for status, _ in await asyncio.gather(*asked)} == {503}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("module", "none_of"),
    [
        ("server.reading.body_job", {"torch", "transformers", "fastapi", "starlette", "uvicorn", "zmq"}),
        ("server.grammar_checks.grammar_job", {"torch", "tokenizers", "pydantic", "fastapi", "zmq"}),
    ],
)
def test_a_job_imports_nothing_that_it_does_not_need(module: str, none_of: set[str]) -> None:
    code = f"import sys, server.helpers.helper_process, {module}; print({none_of} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
