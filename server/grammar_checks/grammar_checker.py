"""Has grammars compiled by a helper process before an engine sees them.

What a client asks of the form of an answer is compiled there first, without a vocabulary, within bounds of
time and memory. Whatever crashes, never ends or takes all memory harms nobody there.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

from engine_core.client.client import EngineClient
from server.errors import ApiError, BadRequest
from server.grammar_checks.grammar_job import AskedGrammar, GrammarSetup
from server.grammars.grammar_limits import (
    COMPILE_MEMORY,
    COMPILE_PROCESSOR_SECONDS,
    COMPILE_SECONDS,
    too_complex,
)
from server.grammars.response_format import AnswerGrammar
from server.helpers.job import Ended, Job
from server.helpers.job_queue import Helpers
from server.helpers.messages import SentError, received_error, sent_error, to_msgpack
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.output_parsing.format_detection import find_format
from server.text.tokenizer import Tokenizer

LONGEST = 1 << 20
"""The most bytes of what is asked. What is read there has smaller limits, each with its own words."""
MOST_KEPT, MOST_BYTES_KEPT = 1024, 16 << 20

_NO_TEXT = "The structured output constraint contains half of a surrogate pair, which is not a character."
_TOO_SLOW = (
    "The structured output constraint takes too long to compile or to follow: use fewer alternatives that "
    "begin alike, and no rule that repeats itself in many ways."
)
_TOO_LARGE = "The structured output constraint takes too much memory to compile."


def _explain(asked: AskedGrammar, ended: Ended) -> BadRequest:
    return too_complex(_TOO_SLOW if ended.code in (None, -signal.SIGPROF) else _TOO_LARGE, asked.field)


GRAMMARS: Job[AnswerGrammar] = Job(
    name="grammars",
    module="server.grammar_checks.grammar_job",
    answer=AnswerGrammar,
    explain=_explain,
    memory=COMPILE_MEMORY,
    seconds=COMPILE_SECONDS,
    processor_seconds=COMPILE_PROCESSOR_SECONDS,
    owner_waiting=64,
    waiting_seconds=COMPILE_SECONDS,
)


class GrammarChecker:
    """The verdicts on what was asked lately, and the queue of what is new."""

    def __init__(
        self,
        helpers: Helpers,
        tokens: Callable[[], Mapping[str, int]],
        parsers: Mapping[str, str] = {},
        job: Job[AnswerGrammar] = GRAMMARS,
    ) -> None:
        """`tokens` gives the ids of special tokens, and is asked when a process is started.

        `parsers` are the operator's files of these, by the flags that name them.
        """
        self.queue = helpers.open(job, lambda: GrammarSetup(dict(tokens()), dict(parsers)))
        self._kept: OrderedDict[bytes, tuple[AnswerGrammar | SentError, int]] = OrderedDict()
        """Verdicts by digest, the one used last at the end, and the bytes of each."""
        self._kept_bytes = 0

    async def check(self, asked: AskedGrammar, owner: str = "") -> AnswerGrammar:
        """The grammar of what a request of this owner asks. Raises the error with which the request ends."""
        try:
            data = to_msgpack(asked)
        except UnicodeEncodeError:
            raise BadRequest(_NO_TEXT, asked.field) from None
        if len(data) > LONGEST:
            raise too_complex(
                f"The structured output constraint may take {LONGEST} bytes at most.", asked.field
            )
        digest = hashlib.sha256(data).digest()
        if (kept := self._kept.get(digest)) is None:
            return await self._find(asked, owner, digest)
        self._kept.move_to_end(digest)
        if isinstance(kept[0], SentError):
            raise received_error(kept[0])
        return kept[0]

    async def _find(self, asked: AskedGrammar, owner: str, digest: bytes) -> AnswerGrammar:
        try:
            found = await self.queue.ask(asked, owner=owner, digest=digest)
        except ApiError as error:
            if error.status == 400:  # with others it has not been checked
                self._keep(digest, sent_error(error), len(error.message))
            raise
        self._keep(digest, found, len(found.text))
        return found

    def _keep(self, digest: bytes, verdict: AnswerGrammar | SentError, size: int) -> None:
        if digest in self._kept:  # several have asked
            return
        self._kept[digest] = verdict, size
        self._kept_bytes += size
        while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_BYTES_KEPT:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._kept_bytes -= dropped


class Model(Protocol):
    """A frontend, as the checks of grammars need it."""

    @property
    def facts(self) -> Facts: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class ModelGrammars:
    """Checks grammars of one model, of whose tokens the engines are told with the first."""

    def __init__(self, model: Model, client: EngineClient, config: ServerConfig, helpers: Helpers) -> None:
        self._model = model
        self._client = client
        self._config = config
        self._checker = GrammarChecker(helpers, self._special_tokens, config.plugins.parsers)
        self._spelled: Tokenizer | None = None

    async def check(self, asked: AskedGrammar, owner: str = "") -> AnswerGrammar:
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

    def _special_tokens(self) -> dict[str, int]:
        """The tokens that are no text, by their names."""
        tokenizer = self._model.tokenizer
        special = tokenizer.special_ids | self._marks().keys()
        return {name: id for name, id in tokenizer.added_tokens.items() if id in special}

    def _marks(self) -> Mapping[int, str]:
        config = self._config
        return find_format(self._model.tokenizer, config.tool_call_parser, config.reasoning_parser).marks
