"""A mixture that two engines serve together gives what one engine gives, also after the end of a rank."""

import asyncio
import os
import signal
from pathlib import Path

from sizes import engine_config
from started_engines import collect, soon, text, until
from tiny import tiny_checkpoint

from engine_core.client.client import EngineClient
from engine_core.config import Replicas
from engine_core.engine_processes import EngineProcesses, start_engines
from engine_core.restarts import keep_engines
from worker.protocol import Sampling

PROMPTS = [[7], [3, 4, 5], list(range(6, 40)), [9, 8]]


async def test_a_mixture_over_two_engines_is_that_of_one(tmp_path: Path) -> None:
    folder = tiny_checkpoint("MixtralForCausalLM", tmp_path, num_local_experts=4)
    alone = await served(folder, 1)
    assert await served(folder, 2) == alone


async def served(folder: Path, size: int) -> list[list[int]]:
    """The answers to all prompts, twice; between these a rank of the last engine is killed."""
    config = engine_config(
        folder, device="cpu", kv_cache_memory_bytes=1 << 20, max_model_len=64, enable_expert_parallel=size > 1
    )
    layout = Replicas(size=size, here=size, together=size > 1)
    engines = start_engines(config, layout, log_level="critical")
    engines.worked = True
    client = EngineClient(engines.addresses[0], layout, restart_wait=60.0)
    keeping = asyncio.create_task(keep_engines(engines, client))
    try:
        answers = await ask_all(client, size)
        os.kill(last_process(engines), signal.SIGKILL)
        await soon(until(lambda: engines.engines[-1].starts == 2))
        return answers + await ask_all(client, size)
    finally:
        keeping.cancel()
        client.close()
        engines.stop(5)


def last_process(engines: EngineProcesses) -> int:
    """The last rank of the last engine, or that engine if its worker is no process."""
    return engines.engines[-1].page.entries()[-1].pid


async def ask_all(client: EngineClient, size: int) -> list[list[int]]:
    await soon(until(lambda: all(one.works for one in client.replicas)))
    streams = [
        client.submit(prompt, Sampling(max_tokens=12, temperature=0.0), replica=number % size)
        for number, prompt in enumerate(PROMPTS)
    ]
    together = [text(outputs) for outputs in await asyncio.gather(*map(collect, streams))]
    lonely = client.submit(PROMPTS[0], Sampling(max_tokens=4, temperature=0.0), replica=size - 1)
    assert text(await collect(lonely)) == together[0][:4], "the others take part without tokens"
    return together
