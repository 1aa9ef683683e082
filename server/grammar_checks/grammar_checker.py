"""Has grammars compiled by a process of their own before an engine sees them.

What a client asks of the form of an answer is compiled there first, without a vocabulary, within bounds of
time and memory. Whatever crashes, never ends or takes all memory harms nobody there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine_core.client.client import EngineClient
from server.answers.format_detection import find_format
from server.errors import ApiError, BadRequest, Unavailable
from server.grammar_checks.check_turns import CheckTurns
from server.grammar_checks.checker_process import CheckerSetup, Question, Verdict
from server.grammars.form_grammar import AnswerGrammar
from server.grammars.grammar_limits import too_complex
from server.model_facts import Facts
from server.offload.answering_process import AnsweringProcess, CannotStart, Ended
from server.offload.messages import ReceivedError, SentError, sent_error
from server.options.server_config import ServerConfig
from server.text.tokenizer import Tokenizer

MODULE = "server.grammar_checks.checker_process"

LONGEST = 1 << 20
"""The most bytes of what is asked. What is read there has smaller limits, each with its own words."""
MOST_KEPT, MOST_BYTES_KEPT = 1024, 16 << 20

_NO_TEXT = "What is asked of the answer contains half of a surrogate pair, which is no character."
_TOO_SLOW = (
    "What is asked of the answer takes longer to compile, or to follow for a few characters, than it may: "
    "have fewer alternatives that begin alike, and no rule that repeats itself in many ways."
)
_TOO_LARGE = "What is asked of the answer takes more memory to compile than it may."

_log = logging.getLogger(__name__)


class CheckLimits(msgspec.Struct, frozen=True):
    """What the check of one grammar may take. The process is killed that takes more."""

    seconds: float = 1.5
    processor_seconds: float = 0.5
    memory: int = 512 << 20
    """Bytes of address space beyond those that the process has when it waits."""


@dataclass
class _UnderWay:
    """A check, and how many requests wait for it."""

    task: asyncio.Task[Verdict]
    waiting: int = 0


class GrammarChecker:
    """The verdicts on what was asked lately, and the process that finds new ones."""

    def __init__(
        self,
        tokens: Callable[[], Mapping[str, int]],
        limits: CheckLimits = CheckLimits(),
        log_level: str = "info",
        parsers: Mapping[str, str] = {},
    ) -> None:
        """`tokens` gives the ids of special tokens, and is asked when a process is started.

        `parsers` are the operator's files of these, by the flags that name them.
        """

        def setup(descriptor: int) -> bytes:
            known = dict(tokens())
            return msgspec.msgpack.encode(
                CheckerSetup(
                    *(descriptor, known, limits.memory, limits.processor_seconds, log_level, dict(parsers))
                )
            )

        self._limits = limits
        self._process = AnsweringProcess("grammar checker", MODULE, setup)
        self._turns = CheckTurns()
        self._start: asyncio.Task[None] | None = None
        self._under_way: dict[bytes, _UnderWay] = {}
        self._kept: OrderedDict[bytes, tuple[Verdict, int]] = OrderedDict()
        """Verdicts by digest, the one used last at the end, and the bytes of each."""
        self._kept_bytes = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def check(self, asked: Question, owner: str = "") -> AnswerGrammar:
        """The grammar of what a request of this owner asks. Raises the error with which the request ends."""
        try:
            data = msgspec.msgpack.encode(asked)
        except UnicodeEncodeError:
            raise BadRequest(_NO_TEXT, asked.field) from None
        if len(data) > LONGEST:
            raise too_complex(f"What is asked of the answer may take {LONGEST} bytes at most.", asked.field)
        digest = hashlib.sha256(data).digest()
        if (kept := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            verdict = kept[0]
        else:
            verdict = await self._new_verdict(digest, data, asked.field, owner)
        if isinstance(verdict, SentError):
            raise ReceivedError(verdict)
        return verdict

    def kill(self) -> None:
        """Ends the process."""
        if self._start is not None and not self._start.done():
            self._start.cancel()
        self._process.kill()

    async def _new_verdict(self, digest: bytes, data: bytes, field: str, owner: str) -> Verdict:
        """Check what is new. Whoever asks the same meanwhile waits for the same verdict; when all of them
        have left, it is not looked for any more."""
        if (found := self._under_way.get(digest)) is None:
            found = _UnderWay(asyncio.create_task(self._find(digest, data, field, owner)))
            self._under_way[digest] = found
        found.waiting += 1
        try:
            return await asyncio.shield(found.task)
        finally:
            found.waiting -= 1
            if not found.waiting:
                found.task.cancel()
                if self._under_way.get(digest) is found:
                    del self._under_way[digest]

    async def _find(self, digest: bytes, data: bytes, field: str, owner: str) -> Verdict:
        async with self._turns.turn(owner):
            verdict = await self._ask(data, field)
        self._keep(digest, verdict)
        if self._process.pid is None:
            self._start = asyncio.create_task(self._start_again())
        return verdict

    async def _start_again(self) -> None:
        """Start the process after it has ended, so that the next grammar does not wait for that."""
        with suppress(ApiError):
            async with self._turns.turn(""):
                await self._process.start()

    async def _ask(self, data: bytes, field: str) -> Verdict:
        seconds = self._limits.seconds
        try:
            return msgspec.msgpack.decode(await self._process.ask([data], seconds), type=Verdict)
        except CannotStart:
            raise Unavailable("The process that reads grammars cannot be started.", retry_after=5) from None
        except TimeoutError:
            _log.warning("a grammar of %d bytes took more than %g s to check", len(data), seconds)
            error = too_complex(_TOO_SLOW, field)
        except Ended as ended:
            _log.warning("checking a grammar of %d bytes: %s", len(data), ended)
            error = too_complex(_TOO_SLOW if ended.code == -signal.SIGPROF else _TOO_LARGE, field)
        return sent_error(error)

    def _keep(self, digest: bytes, verdict: Verdict) -> None:
        size = len(verdict.text if isinstance(verdict, AnswerGrammar) else verdict.message)
        self._kept[digest] = verdict, size
        self._kept_bytes += size
        while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_BYTES_KEPT:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._kept_bytes -= dropped


class Model(Protocol):
    """What is asked of a frontend, when its model is ready."""

    @property
    def facts(self) -> Facts: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class ModelGrammars:
    """Checks grammars of one model, of whose tokens the engines are told with the first."""

    def __init__(self, model: Model, client: EngineClient, config: ServerConfig) -> None:
        self._model = model
        self._client = client
        self._config = config
        self._checker = GrammarChecker(
            self._special_tokens, log_level=config.log.style, parsers=config.plugins.parsers
        )
        self._spelled: Tokenizer | None = None

    async def check(self, asked: Question, owner: str = "") -> AnswerGrammar:
        """The grammar of what a request of this owner asks. Raises the error with which the request ends."""
        if self._spelled is self._model.tokenizer:
            return await self._checker.check(asked, owner)
        # With the first grammar and not before. In a thread, as a large vocabulary takes half a second.
        tokenizer, ends = self._model.tokenizer, self._model.facts.eos_token_ids
        work = asyncio.to_thread(tokenizer.spelling, ends, self._marks())
        grammar, spelling = await asyncio.gather(self._checker.check(asked, owner), work)
        self._client.spell(spelling)
        self._spelled = tokenizer
        return grammar

    def stop(self) -> None:
        """End the process that checks grammars."""
        self._checker.kill()

    def _special_tokens(self) -> dict[str, int]:
        """The tokens that are no text, by their names."""
        tokenizer = self._model.tokenizer
        special = tokenizer.special_ids | self._marks().keys()
        return {name: id for name, id in tokenizer.added_tokens.items() if id in special}

    def _marks(self) -> Mapping[int, str]:
        config = self._config
        return find_format(self._model.tokenizer, config.tool_call_parser, config.reasoning_parser).marks
