"""The prover: what it proves, what ends it, and that the next grammar is proved whatever did."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from server.errors import ApiError, Overloaded
from server.grammars.building import Built
from server.grammars.structured_params import Asked, StructuredOutputsParams
from server.proving.prover import Prover, ProverLimits


def asked(*, strict: bool = False, **params: Any) -> Asked:
    return Asked(StructuredOutputsParams(**params), "response_format", strict)


@asynccontextmanager
async def a_prover(**limits: Any) -> AsyncIterator[Prover]:
    prover = Prover(lambda: {"<call>": 7}, ProverLimits(**{"seconds": 60, **limits}))
    try:
        async with asyncio.timeout(120):
            yield prover
    finally:
        prover.kill()


async def refusal(prover: Prover, one: Asked) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await prover.prove(one)
    return refused.value


async def test_one_process_proves_one_grammar_after_the_other() -> None:
    async with a_prover() as prover:
        assert prover.pid is None  # before the first
        assert (await prover.prove(asked(regex="[ab]"))).kind == "regex"
        pid = prover.pid
        built = await prover.prove(asked(json={"type": "array", "uniqueItems": True}))
        assert built.ignored == ["uniqueItems"]
        tag = {"format": {"type": "token", "token": "<call>"}}
        assert "<[7]>" in (await prover.prove(asked(structural_tag=tag))).text
        assert pid is not None and prover.pid == pid


async def test_what_was_refused_is_refused_again_without_another_proof() -> None:
    async with a_prover() as prover:
        first = await refusal(prover, asked(regex="(a"))
        assert (first.status, first.param) == (400, "response_format")
        os.kill(prover.pid or 0, signal.SIGSTOP)
        again = await refusal(prover, asked(regex="(a"))
        assert again.message == first.message == "`regex` cannot be used: unclosed group"
        os.kill(prover.pid or 0, signal.SIGKILL)


async def test_who_asks_the_same_at_the_same_time_gets_the_same_verdict() -> None:
    async with a_prover() as prover:
        found = await asyncio.gather(*(prover.prove(asked(regex="a+")) for _ in range(100)))
        assert all(one is found[0] for one in found)


async def test_a_process_that_takes_too_long_is_replaced() -> None:
    async with a_prover(seconds=60) as prover:
        await prover.prove(asked(regex="a"))
        prover._limits = ProverLimits(seconds=0.5)
        os.kill(prover.pid or 0, signal.SIGSTOP)
        error = await refusal(prover, asked(regex="b"))
        assert (error.status, error.type) == (400, "schema_too_complex")
        assert "more than 0.5 seconds to compile" in error.message
        assert (await refusal(prover, asked(regex="b"))).message == error.message


async def test_a_process_that_dies_is_replaced() -> None:
    async with a_prover(seconds=60) as prover:
        await prover.prove(asked(regex="a"))
        pid = prover.pid or 0
        os.kill(pid, signal.SIGSTOP)
        late = asyncio.create_task(refusal(prover, asked(regex="b")))
        for _ in range(10):  # until the question is sent: nothing waits before
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert "more memory" in (await late).message
        assert isinstance(await prover.prove(asked(regex="c")), Built)
        assert prover.pid != pid


async def test_a_grammar_gets_only_so_much_memory() -> None:
    async with a_prover(memory=0) as prover:
        each = {"type": "string", "pattern": "[a-z]{1,9}"}
        much = {"type": "object", "properties": {f"p{number}": each for number in range(900)}}
        error = await refusal(prover, asked(json=much))
        assert error.status == 400 and "memory" in error.message


async def test_grammars_wait_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.proving.prover.MOST_WAITING", 2)
    async with a_prover() as prover:
        waiting = [asyncio.create_task(prover.prove(asked(regex=f"a{{{n + 1}}}"))) for n in range(3)]
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in found] == [Built, Built, Overloaded]


async def test_what_is_longer_than_any_limit_is_not_even_sent() -> None:
    async with a_prover() as prover:
        error = await refusal(prover, asked(json={"enum": ["x" * (1 << 20)]}))
        assert error.type == "schema_too_complex" and prover.pid is None


async def test_verdicts_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.proving.prover.MOST_KEPT", 2)
    async with a_prover() as prover:
        first = await prover.prove(asked(regex="a"))
        for pattern in ("b", "a", "c"):
            await prover.prove(asked(regex=pattern))
        assert await prover.prove(asked(regex="a")) is first
        monkeypatch.setattr("server.proving.prover.MOST_BYTES_KEPT", 1)
        await prover.prove(asked(regex="d"))
        assert await prover.prove(asked(regex="a")) is not first


def test_it_imports_nothing_that_it_does_not_need() -> None:
    program = (
        "import sys, server.proving.prover_process; "
        "assert not {'torch', 'tokenizers', 'pydantic', 'fastapi', 'zmq'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
