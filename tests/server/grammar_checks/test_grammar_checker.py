"""The grammar checker: what it checks, what ends it, and that the next grammar is checked whatever did."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from grammar_bombs import STRUCTURED

from server.errors import ApiError
from server.grammar_checks.grammar_checker import GRAMMARS, GrammarChecker
from server.grammars.response_format import AnswerGrammar, AskedForm, StructuredOutputsParams
from server.helpers.job import Ended
from server.helpers.job_queue import Helpers

pytestmark = pytest.mark.slow(3)


def asked(*, strict: bool = False, **params: Any) -> AskedForm:
    return AskedForm(StructuredOutputsParams(**params), "response_format", strict)


@asynccontextmanager
async def a_checker(**limits: Any) -> AsyncIterator[GrammarChecker]:
    helpers, job = Helpers(), replace(GRAMMARS, **{"seconds": 60.0, "processor_seconds": 60.0, **limits})
    try:
        async with asyncio.timeout(120):
            yield GrammarChecker(helpers, lambda: {"<call>": 7}, job=job)
    finally:
        helpers.close()


def pid_of(checker: GrammarChecker) -> int | None:
    return checker.queue.processes[0].pid


async def refusal(checker: GrammarChecker, one: AskedForm) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await checker.check(one)
    return refused.value


async def test_one_process_checks_one_grammar_after_the_other() -> None:
    async with a_checker() as checker:
        assert pid_of(checker) is None  # before the first
        assert (await checker.check(asked(regex="[ab]"))).kind == "regex"
        pid = pid_of(checker)
        built = await checker.check(asked(json={"type": "array", "uniqueItems": True}))
        assert built.ignored == ["uniqueItems"]
        tag = {"format": {"type": "token", "token": "<call>"}}
        assert "<[7]>" in (await checker.check(asked(structural_tag=tag))).text
        assert pid is not None and pid_of(checker) == pid


async def test_a_schema_may_have_bounds_of_more_than_64_bits() -> None:
    async with a_checker() as checker:
        built = await checker.check(asked(json={"type": "integer", "minimum": 0, "maximum": 1 << 256}))
        assert built.kind == "json"
        error = await refusal(checker, asked(json={"enum": [1 << 256]}))
        assert "may be up to 2^53" in error.message


async def test_what_was_refused_is_refused_again_without_another_check() -> None:
    async with a_checker() as checker:
        first = await refusal(checker, asked(regex="(a"))
        assert (first.status, first.param) == (400, "response_format")
        os.kill(pid_of(checker) or 0, signal.SIGSTOP)
        again = await refusal(checker, asked(regex="(a"))
        assert again.message == first.message == "`regex` cannot be used: unclosed group"
        os.kill(pid_of(checker) or 0, signal.SIGKILL)


async def test_who_asks_the_same_at_the_same_time_gets_the_same_verdict() -> None:
    async with a_checker() as checker:
        found = await asyncio.gather(*(checker.check(asked(regex="a+")) for _ in range(100)))
        assert all(one is found[0] for one in found)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (None, "too long to compile"),
        (-signal.SIGPROF, "too long to compile"),
        (-signal.SIGKILL, "too much memory"),
    ],
)
def test_a_grammar_at_which_the_process_ends_is_refused(code: int | None, why: str) -> None:
    error = GRAMMARS.explain(asked(regex="a"), Ended(1.5, code))
    assert error is not None and why in error.message
    assert (error.status, error.type, error.param) == (400, "schema_too_complex", "response_format")


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


async def test_what_is_longer_than_any_limit_is_not_even_sent() -> None:
    async with a_checker() as checker:
        error = await refusal(checker, asked(json={"enum": ["x" * (1 << 20)]}))
        assert error.type == "schema_too_complex" and pid_of(checker) is None


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
