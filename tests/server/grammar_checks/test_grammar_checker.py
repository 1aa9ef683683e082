"""The grammar checker: what it checks, what ends it, and that the next grammar is checked whatever did."""

# pyright: reportPrivateUsage=false
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grammar_bombs import STRUCTURED

from server.errors import ApiError, TooManyRequests
from server.grammar_checks.grammar_checker import CheckLimits, GrammarChecker
from server.grammars.form_grammar import AnswerGrammar, AskedForm, StructuredOutputsParams

pytestmark = pytest.mark.slow(3)


def asked(*, strict: bool = False, **params: Any) -> AskedForm:
    return AskedForm(StructuredOutputsParams(**params), "response_format", strict)


@asynccontextmanager
async def a_checker(**limits: Any) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(
        lambda: {"<call>": 7}, CheckLimits(**{"seconds": 60, "processor_seconds": 60, **limits})
    )
    try:
        async with asyncio.timeout(120):
            yield checker
    finally:
        checker.kill()


async def refusal(checker: GrammarChecker, one: AskedForm) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await checker.check(one)
    return refused.value


async def test_one_process_checks_one_grammar_after_the_other() -> None:
    async with a_checker() as checker:
        assert checker.pid is None  # before the first
        assert (await checker.check(asked(regex="[ab]"))).kind == "regex"
        pid = checker.pid
        built = await checker.check(asked(json={"type": "array", "uniqueItems": True}))
        assert built.ignored == ["uniqueItems"]
        tag = {"format": {"type": "token", "token": "<call>"}}
        assert "<[7]>" in (await checker.check(asked(structural_tag=tag))).text
        assert pid is not None and checker.pid == pid


async def test_what_was_refused_is_refused_again_without_another_check() -> None:
    async with a_checker() as checker:
        first = await refusal(checker, asked(regex="(a"))
        assert (first.status, first.param) == (400, "response_format")
        os.kill(checker.pid or 0, signal.SIGSTOP)
        again = await refusal(checker, asked(regex="(a"))
        assert again.message == first.message == "`regex` cannot be used: unclosed group"
        os.kill(checker.pid or 0, signal.SIGKILL)


async def test_who_asks_the_same_at_the_same_time_gets_the_same_verdict() -> None:
    async with a_checker() as checker:
        found = await asyncio.gather(*(checker.check(asked(regex="a+")) for _ in range(100)))
        assert all(one is found[0] for one in found)


async def test_a_process_that_takes_too_long_is_replaced() -> None:
    async with a_checker(seconds=60) as checker:
        await checker.check(asked(regex="a"))
        checker._limits = CheckLimits(seconds=0.5)
        os.kill(checker.pid or 0, signal.SIGSTOP)
        error = await refusal(checker, asked(regex="b"))
        assert (error.status, error.type) == (400, "schema_too_complex")
        assert "longer to compile" in error.message
        assert (await refusal(checker, asked(regex="b"))).message == error.message


async def test_a_process_that_dies_is_replaced() -> None:
    async with a_checker(seconds=60) as checker:
        await checker.check(asked(regex="a"))
        pid = checker.pid or 0
        os.kill(pid, signal.SIGSTOP)
        late = asyncio.create_task(refusal(checker, asked(regex="b")))
        for _ in range(10):  # until the question is sent: nothing waits before
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert "more memory" in (await late).message
        assert isinstance(await checker.check(asked(regex="c")), AnswerGrammar)
        assert checker.pid != pid


async def test_who_leaves_takes_the_check_along_unless_another_waits_for_it() -> None:
    async with a_checker() as checker:
        await checker.check(asked(regex="a"))
        pid = checker.pid or 0
        os.kill(pid, signal.SIGSTOP)
        gone, stays = [asyncio.create_task(checker.check(asked(regex="b"))) for _ in range(2)]
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGCONT)
        assert isinstance(await stays, AnswerGrammar) and checker.pid == pid
        os.kill(pid, signal.SIGSTOP)
        last = asyncio.create_task(checker.check(asked(regex="c")))
        await asyncio.sleep(0.1)
        last.cancel()
        assert isinstance(await checker.check(asked(regex="d")), AnswerGrammar) and checker.pid != pid


async def test_what_takes_too_much_of_a_processor_is_refused() -> None:
    async with a_checker(processor_seconds=0.1) as checker:
        error = await refusal(checker, asked(grammar=STRUCTURED["Lark, in pairs"]["grammar"]))
        assert (error.status, error.type) == (400, "schema_too_complex")
        assert isinstance(await checker.check(asked(regex="d")), AnswerGrammar)


async def test_a_grammar_gets_only_so_much_memory() -> None:
    async with a_checker(memory=0) as checker:
        each = {"type": "string", "pattern": "[a-z]{1,9}"}
        much = {"type": "object", "properties": {f"p{number}": each for number in range(900)}}
        error = await refusal(checker, asked(json=much))
        assert error.status == 400 and "memory" in error.message


async def test_grammars_wait_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.grammar_checks.check_turns.MOST_WAITING", 1)
    async with a_checker() as checker:
        waiting = [asyncio.create_task(checker.check(asked(regex=f"a{{{n + 1}}}"))) for n in range(3)]
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in found] == [AnswerGrammar, AnswerGrammar, TooManyRequests]


async def test_what_is_longer_than_any_limit_is_not_even_sent() -> None:
    async with a_checker() as checker:
        error = await refusal(checker, asked(json={"enum": ["x" * (1 << 20)]}))
        assert error.type == "schema_too_complex" and checker.pid is None


async def test_verdicts_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.grammar_checks.grammar_checker.MOST_KEPT", 2)
    async with a_checker() as checker:
        first = await checker.check(asked(regex="a"))
        for pattern in ("b", "a", "c"):
            await checker.check(asked(regex=pattern))
        assert await checker.check(asked(regex="a")) is first
        monkeypatch.setattr("server.grammar_checks.grammar_checker.MOST_BYTES_KEPT", 1)
        await checker.check(asked(regex="d"))
        assert await checker.check(asked(regex="a")) is not first


def test_it_imports_nothing_that_it_does_not_need() -> None:
    program = (
        "import sys, server.grammar_checks.checker_process; "
        "assert not {'torch', 'tokenizers', 'pydantic', 'fastapi', 'zmq'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
