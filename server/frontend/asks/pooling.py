"""Asks that are answered with vectors or scores: texts that are pooled, and texts that are compared.

A program asks as an API does, by a `Terms` with a `RequestState` of its own, which it closes:

    with closing(RequestState(media_items=media)) as state:
        asked = Pool(terms=Terms(state, id, created), texts=ReadTexts(items), tell=bar.add)
        answer = await frontend.ask(asked)  # answer.pooled has an engine's answer to each item
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter

import msgspec

from engine_core.protocol import Pooled
from server.access.request_state import Attributes
from server.frontend.asks.parts import AnswerHead, Counts, End, Terms, head_fields
from server.frontend.frontend import Frontend
from server.model_facts import Facts
from server.requests.pooling import PooledText, ReadTexts
from server.requests.scoring import Compared, compute_scores
from server.requests.text_windows import join_windows
from server.schemas.sampling_fields import Usage
from worker.protocol import Vectors

_WINDOWS = attrgetter("windows")


def tell_nobody() -> None:
    """Told of each text that has been pooled where nobody shows progress."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Pool texts: to vectors, to the probabilities of classes, or to rewards."""

    terms: Terms
    texts: ReadTexts
    tell: Callable[[], None] = tell_nobody
    """Called for each text that has been pooled, and for each window of one that is read in several."""

    async def open(self, frontend: Frontend) -> PooledAnswer:
        """Returns the answer when all texts have been pooled. Raises the error that refuses or ends it."""
        run = _Run(frontend, self.terms, len(self.texts.items), self.tell)
        vectors = await run.vectors_of(self.texts.items)
        return PooledAnswer(head=run.head, end=run.end, texts=self.texts, vectors=vectors, pooled=run.pooled)


class Compare(msgspec.Struct, frozen=True, kw_only=True):
    """Compare texts: queries with documents."""

    terms: Terms
    texts: Compared
    tell: Callable[[], None] = tell_nobody
    """Called for each text that has been pooled to compare it."""

    async def open(self, frontend: Frontend) -> ComparedAnswer:
        """Returns the answer when all texts have been compared. Raises the error that refuses or ends it."""
        run = _Run(frontend, self.terms, len(self.texts.documents), self.tell)
        scores = await compute_scores(self.texts, frontend.facts, run.vectors_of)
        return ComparedAnswer(head=run.head, end=run.end, texts=self.texts, scores=scores, pooled=run.pooled)


class PooledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Pool`."""

    head: AnswerHead
    end: End
    texts: ReadTexts
    vectors: Sequence[Vectors]
    """The result of each text, in order."""
    pooled: Sequence[Pooled]
    """What the engine has answered of each text, or of each window of them."""

    @property
    def usage(self) -> Usage:
        return self.head.whole_usage(self.end)


class ComparedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Compare`."""

    head: AnswerHead
    end: End
    texts: Compared
    scores: list[float]
    """The score of each document, in order."""
    pooled: Sequence[Pooled]
    """What the engine has answered of the texts that it was sent last: of each pair, if the model reads the
    two as one."""

    @property
    def usage(self) -> Usage:
        return self.head.whole_usage(self.end)


class _Run:
    """A request whose texts are being pooled: its places, its counts and its times."""

    def __init__(self, frontend: Frontend, terms: Terms, texts: int, tell: Callable[[], None]) -> None:
        """Lets the request in with so many texts, however many are sent for them."""
        self._frontend, self._terms, self._tell = frontend, terms, tell
        self._state = state = terms.state
        places = frontend.engine_requests.places_for(texts, state.caller)
        self._admission = admission = state.admit(frontend.admissions, places)
        self._group = frontend.new_group()
        self.head = AnswerHead(**head_fields(frontend, terms, terms.take_id(admission)))
        self.pooled: Sequence[Pooled] = ()
        """The engine's answers to the texts that were sent last."""
        self._tokens = self._media = 0
        state.work = self

    @property
    def end(self) -> End:
        times = self._state.times
        return End(Counts(self._tokens, times.cached_tokens, 0, None, self._media), times)

    def describe(self) -> Attributes:
        """What a trace tells of the request."""
        return {
            "gen_ai.request.id": self.head.id,
            "gen_ai.response.model": self.head.model,
            "gen_ai.usage.prompt_tokens": self._tokens,
            "gen_ai.usage.completion_tokens": 0,
        }

    async def vectors_of(self, items: Sequence[PooledText]) -> list[Vectors]:
        """Has the engine pool these texts, besides those before; returns the vectors of each, in order."""
        if not items:
            return []
        sent, has_windows = items, any(map(_WINDOWS, items))
        if has_windows:
            sent = [window for item in items for window in (item, *item.windows)]
        state, admission, times = self._state, self._admission, self._state.times
        options = self._terms.add_options(admission, begun=self._tokens > 0)
        options["group"] = self._group
        tokens = sum([item.length for item in sent])
        admission.check_tokens(tokens)
        admission.read(tokens)
        times.submit()
        work = admission.begin_work(tokens)
        try:
            self.pooled = answers = await self._frontend.engine_requests.pool(
                sent,
                admission,
                replica=self._terms.replica,
                media_items=state.media_items,
                tell=self._tell,
                **options,
            )
        finally:
            work.end()
        times.add_round(answers)
        times.cached_tokens += sum([answer.cached for answer in answers])
        self._tokens += tokens
        if state.media_items:
            self._media += sum([placed.embeddings for item in sent for placed in item.media])
        vectors = [answer.vectors for answer in answers]
        return _joined(items, vectors, self.head.facts) if has_windows else vectors


def _joined(items: Sequence[PooledText], found: Sequence[Vectors], facts: Facts) -> list[Vectors]:
    """The vectors of texts of which some were read in windows, from those of all windows."""
    left = iter(found)
    parts = [list(islice(left, 1 + len(item.windows))) for item in items]
    return [
        join_windows(item, own, facts) if item.windows else own[0]
        for item, own in zip(items, parts, strict=True)
    ]
