"""A request between its submission and its last answer: its replica, its stream, what becomes of it if its
engine ends.

Another engine takes it over then, unless it is to blame, and goes on behind the tokens that have come. Nobody
says what an engine computed when it was killed, so all that it may have computed are suspects. One that was
there twice, and got nowhere in between, runs alone in the next engine (`AddRequest.alone`). If that engine
ends too, the request is to blame, and is refused for a while, whoever sends it, unless memory had run out.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Generic, TypedDict, TypeVar, cast

from msgspec.structs import replace

from engine_core.client.replica import DECODE_TOKENS, Replica
from engine_core.prompt_media import Media
from engine_core.protocol import (
    ALONE_TOKENS,
    AddRequest,
    Admitted,
    Failed,
    Grammar,
    Pooled,
    Ready,
    Source,
    Thinking,
    Tokens,
)
from worker.protocol import Sampling
from worker.worker_facts import WorkerFacts

_LEAST = 1e-3
"""The seconds that a request is told to have that has none: 0 would be any number of them."""

GATHERED = 8
"""The answers of which a reader is told at a time that does not want them as they come."""

Answers = TypeVar("Answers", Tokens, Pooled)


class AddOptions(TypedDict, total=False):
    """The optional fields of `AddRequest`, by which a caller says how the engine shall treat a request."""

    priority: int
    owner: str
    weight: float
    max_running: int
    wait: float
    budget: float
    salt: str
    group: int
    streams: bool
    times_each: bool
    grammar: Grammar
    thinking: Thinking
    media: tuple[Media, ...]
    source: Source | None
    most_guesses: int | None
    reports_guesses: bool
    prompt_len: int
    adapter: str
    shared: tuple[int, ...]


class Stream(AsyncIterator[Answers | Failed], Generic[Answers]):
    """The answers to one request, the last of which is terminal. It has one reader."""

    __slots__ = ("_begun", "_gathers", "_loop", "_notice", "_outputs", "_over", "_waiter", "id", "pools")

    def __init__(
        self, id: int, loop: asyncio.AbstractEventLoop, *, pools: bool = False, gathers: bool = False
    ) -> None:
        """`gathers`: its reader is woken for the first answer, for the last one, and between them for several
        at a time."""
        self._begun, self._gathers = False, gathers
        self.id = id
        self.pools = pools
        self._loop = loop
        self._notice: Admitted | None = None
        self._outputs: list[Answers | Failed] = []
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    def put(self, output: Answers | Failed) -> None:
        self._outputs.append(output)
        if not self._gathers or not self._begun or len(self._outputs) >= GATHERED or is_terminal(output):
            self._wake()

    def notify(self, notice: Admitted) -> None:
        """Let the reader know that the request waits. It reads an answer with `expected` and no tokens."""
        self._notice = notice
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __anext__(self) -> Answers | Failed:
        """All answers that have come since the last call, merged to one; waits if there are none."""
        if self._over:
            raise StopAsyncIteration
        if not self._outputs and self._notice is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs, self._outputs = self._outputs, []
        self._begun = self._begun or bool(outputs)
        notice, self._notice = self._notice, None
        if not outputs and notice is not None:
            return cast("Answers", Tokens(id=self.id, tokens=[], expected=notice.expected))
        if len(outputs) > 1 and isinstance(outputs[-1], Failed):
            self._outputs = [outputs.pop()]  # what came before the failure is delivered first
        output = outputs[0] if len(outputs) == 1 else cast("Answers", _merge(outputs))
        self._over = is_terminal(output)
        return output


def is_terminal(output: Tokens | Pooled | Failed) -> bool:
    return not isinstance(output, Tokens) or output.finish is not None


def _merge(outputs: Sequence[Tokens | Pooled | Failed]) -> Tokens:
    parts = [output for output in outputs if isinstance(output, Tokens)]  # nothing else comes in several
    first, last = parts[0], parts[-1]
    return Tokens(
        id=first.id,
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[entry for part in parts for entry in part.logprobs],
        prompt_logprobs=first.prompt_logprobs,
        cached=first.cached,
        finish=last.finish,
        timing=last.timing,
        expected=first.expected,
        guesses=last.guesses,
    )


@dataclass(slots=True, eq=False)
class InFlight:
    add: AddRequest
    """The request as it is sent next."""
    stream: Stream[Any]
    pin: int | None = None
    """The one replica that may have it, if the client named one."""
    id: int = field(init=False)
    since: float = field(init=False)
    """When the times that `add` gives it began, if it gives it any."""
    replica: Replica | None = None
    deadline: float | None = None
    """The time on the event loop's clock until which it may wait for a replica, if it waits for one."""
    paused: bool = False
    """Whether its answer is not read, so that nothing shall be computed for it."""
    started: bool = False
    """Whether an answer has come from its replica."""
    emitted: array[int] = field(default_factory=partial(array, "i"))
    """The tokens that are in the stream, from whichever engines."""
    began: float = 0.0
    """The time at which the first of them came."""
    facts: WorkerFacts | None = None
    """The facts of the engine from which the last of them came."""
    strikes: int = 0
    """The engines that have ended in a row while they may have computed it, and it got nowhere."""
    resent: int = 0
    """The tokens that had come when it was sent last."""
    runs_alone: bool = False
    tokens: int = 0
    """Its share of the replica's load, in tokens to compute."""

    def __post_init__(self) -> None:
        self.id = self.add.id
        self.since = time.monotonic() if self.add.wait or self.add.budget else 0.0

    @property
    def progress(self) -> int:
        """The tokens that have come since it was sent last."""
        return len(self.emitted) - self.resent

    def assign(self, replica: Replica, tokens: int) -> None:
        """Count the request as one of this replica's, which has to compute so many tokens for it."""
        self.replica, self.tokens, self.deadline = replica, tokens, None
        replica.requests += 1
        replica.tokens += tokens

    def start(self) -> None:
        """Note that its replica gives its first token: what it had to read is computed."""
        self.started = True
        if not self.emitted:
            self.began = time.monotonic()
        if self.replica is not None:
            self.replica.tokens += DECODE_TOKENS - self.tokens
            self.facts = self.replica.ready.worker if self.replica.ready is not None else None
        self.tokens = DECODE_TOKENS

    def unassign(self) -> None:
        """Take the request off the load of its replica, which does nothing more for it."""
        if self.replica is not None:
            self.replica.requests -= 1
            self.replica.tokens -= self.tokens
        self.replica = None

    @property
    def seconds_left(self) -> float:
        """The seconds that it may still take, or wait if it has not begun."""
        add = self.add
        limits = [add.budget, 0.0 if self.emitted else add.wait]
        return min([limit for limit in limits if limit], default=inf) - (time.monotonic() - self.since)

    def shorten(self) -> None:
        """Take the time that has passed off the times that its next engine is told, if it cannot know it."""
        if not self.since or self.add.sent:
            return
        now = time.monotonic()
        passed, self.since = now - self.since, now
        wait, budget = [
            max(limit - passed, _LEAST) if limit else 0.0 for limit in (self.add.wait, self.add.budget)
        ]
        self.add = replace(self.add, wait=wait, budget=budget)


STRIKES = 2
"""The strikes with which a request runs alone."""


def take_back(one: InFlight) -> None:
    """Make it a request for another replica, which goes on behind the tokens that have come.

    That one does not say again what comes with the first token.
    """
    one.unassign()
    one.shorten()
    one.started = one.runs_alone = False
    one.resent = len(one.emitted)
    add, params = one.add, one.add.params
    alone = one.strikes >= STRIKES
    if not one.emitted or not isinstance(params, Sampling):
        one.add = replace(add, alone=alone) if alone != add.alone else add
        return
    prompt = prompt_of(add)
    one.add = replace(
        add,
        alone=alone,
        tokens=prompt + one.emitted.tolist(),
        prompt_len=len(prompt),
        began=one.began if add.sent else 0.0,
        params=replace(params, prompt_logprobs=None),
    )


def can_go_on(one: InFlight, facts: WorkerFacts) -> bool:
    """Whether an engine of these facts would emit the very tokens that are still to come."""
    if not one.emitted or one.facts is None:
        return True
    same_limit = _token_limit(one.add, facts) == _token_limit(one.add, one.facts)
    return facts.fingerprint == one.facts.fingerprint and same_limit


def _token_limit(add: AddRequest, facts: WorkerFacts) -> int:
    """The number of tokens, the prompt's included, at which an engine of these facts ends an answer."""
    most = add.params.max_tokens if isinstance(add.params, Sampling) else 0
    return min(len(prompt_of(add)) + most, facts.max_model_len)


def blame(requests: list[InFlight], ready: Ready) -> InFlight | None:
    """Count the end of their engine against requests; returns the one that is to blame, if that is known."""
    for one in requests:
        if one.runs_alone and one.progress < ALONE_TOKENS:
            return one
    for one in _computed(requests, ready):
        # One that makes engines end does so where it did before, or a few tokens later.
        one.strikes = 1 if one.progress >= ALONE_TOKENS else one.strikes + 1
    return None


def _computed(requests: list[InFlight], ready: Ready) -> Iterator[InFlight]:
    """The requests that an engine may have computed: those that had begun, and the next ones in order."""
    by_priority = ready.scheduling_policy == "priority"
    waiting = [one for one in requests if not one.started]
    waiting.sort(key=lambda one: one.add.priority if by_priority else one.add.priority > 0)
    slots = ready.worker.max_num_seqs
    yield from (one for one in requests if one.started)
    yield from [one for one in waiting if one.stream.pools][:slots]
    yield from [one for one in waiting if not one.stream.pools][:slots]


def prompt_of(add: AddRequest) -> list[int]:
    """The tokens of the prompt, without those that earlier engines have emitted."""
    return add.tokens[: add.prompt_len] if add.prompt_len else add.tokens
