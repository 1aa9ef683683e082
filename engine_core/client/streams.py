"""The stream of answers to one request: in order, and all that have come at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Generic, TypeVar, cast

from engine_core.protocol import Admitted, Failed, Pooled, Tokens

Answers = TypeVar("Answers", Tokens, Pooled)


class Stream(AsyncIterator[Answers | Failed], Generic[Answers]):
    """The answers to one request, the last of which is terminal. It has one reader."""

    __slots__ = ("_loop", "_notice", "_outputs", "_over", "_waiter", "id", "pools")

    def __init__(self, id: int, loop: asyncio.AbstractEventLoop, *, pools: bool = False) -> None:
        self.id = id
        self.pools = pools
        self._loop = loop
        self._notice: Admitted | None = None
        self._outputs: list[Answers | Failed] = []
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    def put(self, output: Answers | Failed) -> None:
        self._outputs.append(output)
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
        miss=first.miss,
    )
