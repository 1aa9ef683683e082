"""Runs a beam search as requests for one token each, whose answers it shows as those of one request.

Each request goes on behind an answer that the search follows. What they have in common lies in the prefix
cache, so that a request computes the tokens behind the last full block; without a prefix cache it computes
all. The engine knows nothing of the search.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from engine_core.client.client import EngineClient
from engine_core.client.in_flight import AddOptions, Stream
from engine_core.engine_stats import Timing
from engine_core.protocol import Failed, Tokens
from server.access.client_identity import of_later_texts
from server.errors import from_engine
from server.frontend.text_output import CheckedPrompt, Choice, Delta
from server.requests.beam_search import FIRST_ROUND, Beam, BeamRules, advance
from server.text.tokenizer import unpack
from worker.protocol import Sampling


class BeamRequests:
    """The requests of one search, a round of them at a time."""

    def __init__(
        self,
        client: EngineClient,
        asked: CheckedPrompt,
        rules: BeamRules,
        seconds_to_wait: Callable[[], int],
    ) -> None:
        """`seconds_to_wait` says when a client may come again whose request fails."""
        self._client, self._asked, self._rules, self._admission = client, asked, rules, asked.admission
        self._seconds_to_wait = seconds_to_wait
        self._prompt = unpack(asked.prompt)
        self._sent, self._first_token = time.monotonic(), 0.0
        self._timings: list[list[Timing]] = []
        """The times of the requests of each round."""

    async def deltas(self, choices: Sequence[Choice]) -> AsyncGenerator[Delta, None]:
        """Yields the answers that are found, the best one first: one delta for each of `choices`."""

        def count(cached: int) -> None:
            for choice in choices:
                choice.count(1, cached)

        try:
            found = await self._find(count)
            if isinstance(found, Failed):
                choices[0].fail()
                raise from_engine(found, self._seconds_to_wait())
            for choice, answer in zip(choices, _padded(found, len(choices)), strict=True):
                if (delta := choice.push(answer)) is not None:
                    yield delta
        finally:
            for choice in choices:
                choice.close()
            self._admission.shrink(self._admission.count - len(choices))

    async def _find(self, count: Callable[[int], None]) -> list[Tokens] | Failed:
        """Run the search, and return the answers: as many as it follows, if there are so many.

        `count` is called when a round has landed, with the prompt's tokens that it found in the cache.
        """
        round, first = FIRST_ROUND, Tokens(id=0, tokens=[])
        while round.followed:
            landed = await self._run(round.followed, self._rules.sampling(round))
            for output in landed:
                if isinstance(output, Failed) or output.finish == "abort":
                    return output if isinstance(output, Failed) else [output]
            outputs = [output for output in landed if isinstance(output, Tokens)]
            self._timings.append([output.timing for output in outputs if output.timing is not None])
            if round is FIRST_ROUND:
                [first], self._first_token = outputs, time.monotonic()
            count(first.cached if round is FIRST_ROUND else 0)
            round = advance(round, [output.logprobs[0] for output in outputs], self._rules)
        return [self._whole(beam, first, is_best=not index) for index, beam in enumerate(round.found)]

    async def _run(self, followed: Sequence[Beam], row: Sampling) -> list[Tokens | Failed]:
        """Ask for the token behind each answer, and return what came of each request, in order."""
        self._admission.check()
        streams = self._client.submit_all(
            [([*self._prompt, *beam.tokens], row) for beam in followed],
            replica=self._asked.replica,
            **self._options(begun=bool(followed[0].tokens)),
        )
        ids = [stream.id for stream in streams]
        self._admission.streams.update(ids)
        try:
            return [await last_answer(stream) for stream in streams]
        finally:
            self._client.abort(ids)
            self._admission.streams.difference_update(ids)

    def _options(self, *, begun: bool) -> AddOptions:
        """What the engine is told of a round: answers that have begun come before other clients' new ones."""
        options: AddOptions = {**self._asked.options, "most_guesses": 0}
        if begun:
            options = {
                **of_later_texts(options, time.monotonic() - self._sent),
                "prompt_len": len(self._prompt),
            }
        return options

    def _whole(self, beam: Beam, first: Tokens, *, is_best: bool) -> Tokens:
        """An answer as if it were the only one. The best one tells the times of the search."""
        return Tokens(
            id=first.id,
            tokens=beam.tokens,
            logprobs=beam.logprobs,
            cached=first.cached,
            finish=beam.finish,
            timing=self._timing() if is_best else None,
            expected=first.expected,
        )

    def _timing(self) -> Timing | None:
        """The times of all requests as those of one: those of a round are computed side by side."""
        every = [timing for timings in self._timings for timing in timings]
        if not every:
            return None
        return Timing(
            queued=every[0].queued,
            prefill=every[0].prefill,
            decode=time.monotonic() - self._first_token,
            preemptions=sum([timing.preemptions for timing in every]),
            steps=sum([max(timing.steps for timing in timings) for timings in self._timings if timings]),
            compute=sum([timing.compute for timing in every]),
        )


async def last_answer(stream: Stream[Tokens]) -> Tokens | Failed:
    """The terminal answer to a request for one token, which brings that token."""
    async for output in stream:
        if isinstance(output, Failed) or output.finish is not None:
            return output
    raise RuntimeError("a stream has ended without a terminal answer")


def _padded(found: Sequence[Tokens], count: int) -> Iterable[Tokens]:
    """So many answers: empty ones follow those that there are, which may be fewer in a tiny vocabulary."""
    yield from found
    for _ in range(count - len(found)):
        yield Tokens(id=found[0].id, tokens=[], finish=found[0].finish)
