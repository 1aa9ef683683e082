"""`AsyncLLM` on real engine processes: streams, ends of requests, ends of engines, ends of programs."""

# pyright: reportPrivateUsage=false
import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
import pytest_asyncio
from live import alive, wait_until

from facet import (
    AsyncEngineArgs,
    AsyncLLM,
    BadRequest,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    Unavailable,
)
from server.frontend.engine_requests import EngineRequests
from server.frontend.text_output import Delta

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAPITAL = "The capital of France is"
OPTIONS = {"dtype": "float32", "kv_cache_memory_bytes": "64m", "cpu_threads": 1}
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM.from_engine_args(AsyncEngineArgs("demo", **OPTIONS)) as engine:
        yield engine


def live(engine: AsyncLLM) -> int:
    """How many answers and texts are not finished, as the frontend counts them."""
    assert engine._connection is not None
    return engine._connection.frontend.live


async def idle(engine: AsyncLLM) -> None:
    """Waits until the engine process itself has nothing to do."""
    assert engine._connection is not None
    client = engine._connection.client
    for _ in range(6000):
        if not live(engine) and client.stats is not None and client.stats.running == 0:
            return
        await asyncio.sleep(0.01)
    raise TimeoutError(f"still {client.stats}")


@pytest.mark.slow
async def test_a_prompt_loses_its_beginning_if_asked(engine: AsyncLLM):
    for prompt in (CAPITAL, [5, 6, 7, 8], "Once upon a time. " * 4096):
        params = SamplingParams(truncate_prompt_tokens=2, max_tokens=1)
        async for output in engine.generate(prompt, params):
            assert len(output.prompt_token_ids) == 2
            assert prompt != [5, 6, 7, 8] or output.prompt_token_ids == [7, 8]


def pid_of(engine: AsyncLLM) -> int:
    return engine._engines.engines[0].process.pid


async def text(engine: AsyncLLM, prompt: str, **params: object) -> str:
    kind = RequestOutputKind.FINAL_ONLY
    sampling = SamplingParams(temperature=0, max_tokens=6, output_kind=kind, **params)  # pyright: ignore
    outputs = [output async for output in engine.generate(prompt, sampling)]
    assert len(outputs) == 1 and outputs[0].finished
    return outputs[0].outputs[0].text


async def test_a_notice_that_a_request_waits_is_no_output(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch):
    generate = EngineRequests.generate

    async def announced(*arguments: Any, **options: Any) -> AsyncIterator[Delta]:
        yield Delta(0, expected=2.5)
        async with aclosing(generate(*arguments, **options)) as deltas:
            async for delta in deltas:
                yield delta

    monkeypatch.setattr(EngineRequests, "generate", announced)
    outputs = [output async for output in engine.generate(CAPITAL, SamplingParams(max_tokens=4))]
    assert all(output.outputs[0].token_ids for output in outputs)
    metrics = outputs[-1].metrics
    assert metrics is not None and metrics.prefill_time > 0 and metrics.steps >= 1
    [pooled] = [one async for one in engine.encode(CAPITAL, PoolingParams(task="embed"))]
    assert pooled.metrics is not None and pooled.metrics.prefill_time > 0 and pooled.metrics.compute_time > 0


async def test_outputs_grow_until_they_are_finished(engine: AsyncLLM):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = [output async for output in engine.generate(CAPITAL, params, request_id="mine")]
    texts = [output.outputs[0].text for output in outputs]
    assert "Paris" in texts[-1] and all(texts[-1].startswith(one) for one in texts)
    last = outputs[-1]
    assert (last.request_id, last.prompt, last.finished) == ("mine", CAPITAL, True)
    assert len(last.outputs[0].token_ids) == 8 and last.outputs[0].finish_reason == "length"
    assert last.metrics is not None and last.metrics.scheduled_ts > 0
    assert engine.is_running and not engine.errored and engine.dead_error is None
    await engine.check_health()


async def test_many_at_once(engine: AsyncLLM):
    prompts = [f"{CAPITAL} {number}" for number in range(200)]  # more than run at once
    alone = [await text(engine, prompt) for prompt in prompts[:3]]
    together = await asyncio.gather(*(text(engine, prompt) for prompt in prompts))
    assert together[:3] == alone


async def test_closing_the_generator_ends_the_request(engine: AsyncLLM):
    async with aclosing(engine.generate(CAPITAL, ENDLESS)) as outputs:
        await anext(outputs)
        assert live(engine) == 1
    assert live(engine) == 0
    await idle(engine)


async def test_leaving_the_loop_over_a_generator_ends_the_request(engine: AsyncLLM):
    async for _ in engine.generate(CAPITAL, ENDLESS):
        break
    gc.collect()
    await idle(engine)


async def test_cancelling_the_task_ends_the_request(engine: AsyncLLM):
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate(CAPITAL, ENDLESS):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert live(engine) == 0
    await idle(engine)


async def test_abort_ends_the_stream_with_what_there_is(engine: AsyncLLM):
    outputs: list[RequestOutput] = []
    async for output in engine.generate(CAPITAL, ENDLESS, request_id="x"):
        if not outputs:
            await engine.abort(["x", "unknown"])
        outputs.append(output)
    assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].outputs[0].text.startswith(outputs[0].outputs[0].text)
    await idle(engine)


async def test_abort_ends_what_is_not_sent_yet(engine: AsyncLLM):
    params = SamplingParams(truncate_prompt_tokens=2, max_tokens=4, ignore_eos=True, n=2)
    slow = engine.generate("Once upon a time. " * 4096, params, "slow")  # a thread reads it meanwhile
    task = asyncio.ensure_future(anext(slow))
    await asyncio.sleep(0)
    await engine.abort("slow")
    output = await task
    assert output.finished and len(output.prompt_token_ids) == 2
    assert [(one.finish_reason, one.token_ids) for one in output.outputs] == [("abort", [])] * 2
    assert [one async for one in slow] == []
    pooled = engine.encode("Once upon a time. " * 4096, PoolingParams(truncate_prompt_tokens=2), "slow")
    task = asyncio.ensure_future(anext(pooled))
    await asyncio.sleep(0)
    await engine.abort("slow")
    with pytest.raises(Unavailable, match="ended before it was done"):
        await task
    assert not engine._unsent
    await idle(engine)


async def test_requests_of_one_id_end_together(engine: AsyncLLM):
    both = [engine.generate(CAPITAL, ENDLESS, request_id="same") for _ in range(2)]
    begun = [await anext(outputs) for outputs in both]
    await engine.abort("same")
    ends = [[output async for output in outputs][-1] for outputs in both]
    assert [(one.request_id, one.outputs[0].finish_reason) for one in ends] == [("same", "abort")] * 2
    assert not any(output.finished for output in begun) and live(engine) == 0


async def test_refused_requests(engine: AsyncLLM):
    async def refused(kind: type[Exception], message: str, prompt: object, params: object, **more: object):
        with pytest.raises(kind, match=message):
            await anext(engine.generate(prompt, params, **more))  # pyright: ignore

    await refused(BadRequest, "temperature", "a", SamplingParams(temperature=5))
    await refused(ValueError, "out-of-vocab", [10**7], SamplingParams())
    await refused(BadRequest, "longer than|exceeds", [5] * 5000, SamplingParams())
    await refused(TypeError, "a prompt is a text", 5, SamplingParams())
    await refused(TypeError, "takes SamplingParams, not PoolingParams", "a", PoolingParams())
    await refused(TypeError, "lora_request is a LoRARequest, not int", "a", SamplingParams(), lora_request=1)
    with pytest.raises(BadRequest, match="'classify'"):
        await anext(engine.encode("a", PoolingParams(task="classify")))
    with pytest.raises(TypeError, match="takes PoolingParams"):
        await anext(engine.encode("a", SamplingParams()))  # pyright: ignore[reportArgumentType]
    assert live(engine) == 0


async def test_the_tokenizer_of_transformers(engine: AsyncLLM):
    tokenizer = await engine.get_tokenizer()
    async for output in engine.generate(CAPITAL, SamplingParams(max_tokens=1)):
        assert output.prompt_token_ids == tokenizer.encode(CAPITAL)


async def test_a_forgotten_prefix_cache(engine: AsyncLLM):
    prompt = [*range(300, 340)]

    async def cached() -> int | None:
        return [output async for output in engine.generate(prompt, SamplingParams())][-1].num_cached_tokens

    await cached()
    assert await cached()
    assert await engine.reset_prefix_cache()
    assert await cached() == 0


async def test_another_event_loop_is_refused(engine: AsyncLLM):
    with pytest.raises(RuntimeError, match="used in another event loop already"):
        await asyncio.to_thread(asyncio.run, engine.start())


@pytest.mark.slow
async def test_two_at_once_and_the_death_of_one(engine: AsyncLLM):
    async with AsyncLLM("demo", data_parallel_size=1, max_num_seqs=2, restart_wait=60, **OPTIONS) as other:
        answers = await asyncio.gather(*(text(one, CAPITAL) for one in (engine, other) * 3))
        assert len(set(answers)) == 1

        async def endless() -> None:
            async for _ in other.generate(CAPITAL, ENDLESS):
                if not begun.is_set():
                    begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(endless())
        await begun.wait()
        os.kill(pid_of(other), signal.SIGKILL)
        assert await text(other, CAPITAL) == answers[0]  # by the engine that is started in its place
        assert other.is_running and not other.errored
        assert not task.done()
        task.cancel()
    assert await text(engine, CAPITAL) == answers[0]


@contextmanager
def shut_down(engine: AsyncLLM) -> Iterator[AsyncLLM]:
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_forked_process_ends_no_engine_of_another(engine: AsyncLLM):
    before, loop = await text(engine, CAPITAL), asyncio.get_running_loop()
    if (child := os.fork()) == 0:
        try:
            loop._thread_id = None  # pyright: ignore  # as if it had been forked while the loop stood still
            engine.shutdown()  # as the interpreter does at its end
        finally:
            os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    async with asyncio.timeout(20):
        assert await text(engine, CAPITAL) == before


@pytest.mark.slow
async def test_replicas():
    with shut_down(AsyncLLM("demo", data_parallel_size=2, **OPTIONS)) as engine:
        await engine.start()
        numbers = (0, 1)
        params = SamplingParams(temperature=0, max_tokens=4)

        async def by(number: int) -> list[int]:
            stream = engine.generate(CAPITAL, params, data_parallel_rank=number)
            return [output async for output in stream][-1].outputs[0].token_ids

        while any(not one.works for one in engine._connection.client.replicas):  # pyright: ignore
            await asyncio.sleep(0.05)
        assert len({tuple(await by(number)) for number in numbers}) == 1


async def test_shutdown_while_the_model_loads():
    """A task that waits gets an error: it was not cancelled itself, so it must not look cancelled."""
    with shut_down(AsyncLLM("demo", **OPTIONS)) as engine:
        waiting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        cancelled.cancel()
        engine.shutdown()
        with pytest.raises(Unavailable, match="The engine has been shut down"):
            await waiting
        with pytest.raises(asyncio.CancelledError):
            await cancelled


@pytest.mark.slow
async def test_requests_that_run_at_a_shutdown_end_with_an_error():
    with shut_down(AsyncLLM("demo", **OPTIONS)) as engine:
        stream = engine.generate(CAPITAL, SamplingParams(max_tokens=None, ignore_eos=True))
        await anext(stream)
        engine.shutdown()
        with pytest.raises(Unavailable, match="The engine has been shut down"):
            [_ async for _ in stream]


async def test_a_model_that_cannot_be_loaded():
    with shut_down(AsyncLLM("/no such")) as engine:
        for _ in range(2):
            with pytest.raises(Unavailable, match="'/no such' is neither a folder nor a GGUF file here"):
                await engine.start()
        assert engine.errored
    engine.shutdown()  # once more does nothing
    assert str(engine.dead_error) == "The engine has been shut down."
    with pytest.raises(Unavailable, match="shut down"):
        await engine.start()


@pytest.mark.slow
async def test_a_tokenizer_that_cannot_be_loaded():
    with shut_down(AsyncLLM("demo", default_prompt_name="absent", **OPTIONS)) as engine:
        with pytest.raises(ValueError, match="no prompt named 'absent'"):
            await engine.start()
        assert engine.errored


# The ends of programs, and options.


async def test_options_are_read_as_those_of_serve():
    with pytest.raises(ValueError, match="max_model_length; did you mean max_model_len"):
        AsyncLLM("demo", max_model_length=10)
    with pytest.raises(ValueError, match="headless"):
        AsyncLLM("demo", headless=True, data_parallel_size=2, cluster_key="k" * 40)


PROGRAM = """
import asyncio, sys
from facet import AsyncLLM, SamplingParams

async def main():
    engine = AsyncLLM("demo", dtype="float32", kv_cache_memory_bytes="64m", cpu_threads=1)
    async for output in engine.generate("a", SamplingParams(max_tokens=None, ignore_eos=True)):
        print(engine._engines.engines[0].process.pid, engine._engines.run_folder, flush=True)
        if sys.argv[1] == "returns":
            break
        if sys.argv[1] == "raises":
            raise KeyError

asyncio.run(main())
"""


@pytest.mark.turns(9)
@pytest.mark.parametrize(("end", "code"), [("returns", 0), ("raises", 1), ("is killed", -9)])
async def test_the_engine_ends_with_the_program(end: str, code: int):
    """No call of shutdown is needed, and no warning comes."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stderr is not None
        pid, folder = program.stdout.readline().split()
        if end == "is killed":
            program.kill()
        program.stdout.close()
        errors = program.stderr.read()
        assert program.wait(60) == code, errors
    wait_until(lambda: not alive(int(pid)), 10, f"the engine {pid} lives on")
    assert "Warning" not in errors and ("KeyError" in errors) == (end == "raises")
    if end != "is killed":
        assert not os.path.exists(folder)
