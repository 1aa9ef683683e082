"""The ends of an `AsyncLLM`: with its program, however that ends, and before it begins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from live import alive, wait_until

from facet import AsyncLLM


def test_options_are_read_as_those_of_serve():
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


@pytest.mark.parametrize(("end", "code"), [("returns", 0), ("raises", 1), ("is killed", -9)])
def test_the_engine_ends_with_the_program(end: str, code: int):
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
