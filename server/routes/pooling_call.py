"""Shared by the pooling endpoints: their checks, reading texts, running them, usage, very long answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

import msgspec
from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse

from engine_core.protocol import Pooled
from server.access.admission import Admission
from server.access.client_identity import caller_of, require_right
from server.access.time_limits import limits_of
from server.api.common import CacheDiagnoses, Usage, make_usage
from server.api.pooling_bodies import PooledList
from server.errors import ApiError
from server.http.sse import encode
from server.http.traces import Attributes
from server.requests.cache_diagnosis import Asked, CacheDiagnosis, explain_miss, one_or_all
from server.requests.pooling import Item, Terms
from server.requests.scoring import Compared, Scorer, compare_all
from server.routes.generation import (
    COMPUTES,
    admit,
    config_of,
    frontend_of,
    priority_of,
    replica_of,
    request_id_of,
    times_of,
)
from server.task_names import POOLING, no_scores, no_task, require_task
from server.text.tokenizer import unpack
from worker.protocol import Vectors

FEW_VECTORS = 256
"""So many vectors are compared or written in the event loop; more of them in a thread."""
PIECE_BYTES = 256 << 10
"""An answer longer than this many bytes is written in pieces, so that it is never in memory as a whole."""

T = TypeVar("T")


async def require_embed(request: Request) -> None:
    require_right(request, "embed")
    require_task("embed", frontend_of(request).facts.tasks)


async def require_classify(request: Request) -> None:
    require_right(request, "classify")
    require_task("classify", frontend_of(request).facts.tasks)


async def require_pooling(request: Request) -> None:
    require_right(request, *POOLING)
    tasks = frontend_of(request).facts.tasks
    if not any(task in POOLING for task in tasks):
        raise no_task("pooling", tasks)


async def require_scores(request: Request) -> None:
    require_right(request, "score")
    facts = frontend_of(request).facts
    if facts.score_type is None:
        raise no_scores(facts.tasks, facts.pooling.num_labels)


EMBEDS = [*COMPUTES, Depends(require_embed)]
CLASSIFIES = [*COMPUTES, Depends(require_classify)]
POOLS = [*COMPUTES, Depends(require_pooling)]
SCORES = [*COMPUTES, Depends(require_scores)]


class PoolingCall:
    """A pooling request while it is answered."""

    def __init__(self, request: Request, terms: Terms, prefix: str = "") -> None:
        self.frontend = frontend_of(request)
        self.frontend.check_model(terms.model)
        self.facts = self.frontend.facts
        self.id = prefix + request_id_of(request, terms.request_id)
        self.created = int(time.time())
        self.model = self.facts.model_names[0]
        self.tokens = 0
        self._request = request
        self._times = times_of(request)
        self._terms = terms
        self._replica = replica_of(request)
        self._priority = priority_of(request, terms.priority)
        self._group = self.frontend.new_group()
        access = config_of(request).access
        self._limits = limits_of(request, access, self._times.started, terms.timeout)
        self.diagnoses = "cache_diagnosis" in terms.include
        """Whether the answer shall say why no longer prefixes were cached."""
        self._diagnoses: list[CacheDiagnosis] = []
        self._admission: Admission | None = None
        request.scope["work"] = self

    def describe(self) -> Attributes:
        """What a trace tells of this request."""
        return {
            "gen_ai.request.id": self.id,
            "gen_ai.response.model": self.model,
            "gen_ai.usage.prompt_tokens": self.tokens,
            "gen_ai.usage.completion_tokens": 0,
        }

    async def run(self, items: Sequence[Item]) -> list[Vectors]:
        admission = self.admit(len(items))
        options = admission.caller.add_options(self._priority, self._terms.salt)
        options["group"] = self._group
        if self._limits is not None:
            self._limits.add_to(options, begun=self.tokens > 0)
        if self.diagnoses:
            options["diagnoses"] = True
        tokens = sum([item.length for item in items])
        admission.check_tokens(tokens)
        admission.read(tokens)
        self._times.submit()
        answers = await self.frontend.pool(
            items, request_id=self.id, replica=self._replica, admission=admission, **options
        )
        self._times.add_round(answers)
        self.tokens += tokens
        self._times.cached_tokens += sum(answer.cached for answer in answers)
        if self.diagnoses:
            is_long = len(items) > FEW_VECTORS
            self._diagnoses += await maybe_in_thread(lambda: self._diagnose(items, answers), is_long)
        return [answer.vectors for answer in answers]

    def _diagnose(self, items: Sequence[Item], answers: Sequence[Pooled]) -> list[CacheDiagnosis]:
        """Why no longer prefix of each text was cached."""
        truncation, size = self._terms.truncation, self.facts.ready.worker.block_size
        return [
            explain_miss(
                Asked(unpack(item.tokens), truncation.left and item.length == truncation.keep),
                *(answer.miss, answer.cached, self.frontend.tokenizer, size),
            )
            for item, answer in zip(items, answers, strict=True)
            if answer.miss is not None
        ]

    @property
    def cache_diagnosis(self) -> CacheDiagnoses:
        """The diagnosis of each text, if asked for, in the order in which they were computed."""
        return one_or_all(self._diagnoses)

    async def score(self, compared: Compared) -> list[float]:
        self.admit(len(compared.documents))
        scorer = compare_all(compared, self.facts)
        items, scores = next(scorer), None
        while scores is None:
            try:
                answers = await self.run(items)
            except ApiError as error:
                items = scorer.throw(error)  # the scorer may know another way
            else:
                is_long = len(answers) > FEW_VECTORS
                items, scores = await maybe_in_thread(partial(_send, scorer, answers), is_long)
        return scores

    def usage(self) -> Usage:
        config = config_of(self._request)
        usage = make_usage(
            self.tokens, 0, self._times.cached_tokens if config.enable_prompt_tokens_details else None
        )
        if config.reports.enable_timing or "timing" in self._terms.include:
            usage.timing = self._times.report()
        return usage

    def answer(self, entries: Iterable[msgspec.Struct]) -> Response:
        """The answer in the shape of the OpenAI API: a list with an entry for each text."""
        head = PooledList(
            id=self.id,
            created=self.created,
            model=self.model,
            usage=self.usage(),
            cache_diagnosis=self.cache_diagnosis,
        )
        return list_response(head, map(encode, entries))

    def admit(self, texts: int) -> Admission:
        """Lets the request in with so many texts. Later calls change nothing."""
        if self._admission is None:
            places = self.frontend.places_for(texts, caller_of(self._request))
            self._admission = admit(self._request, self.frontend, places)
            self.id = self._admission.take_id(self.id)
        return self._admission


def _send(scorer: Scorer, answers: list[Vectors]) -> tuple[list[Item], list[float] | None]:
    """The next items to compute, or the scores."""
    try:
        return scorer.send(answers), None
    except StopIteration as end:
        return [], end.value


async def maybe_in_thread(work: Callable[[], T], in_thread: bool) -> T:
    return await asyncio.to_thread(work) if in_thread else work()


def list_response(head: PooledList, entries: Iterable[bytes]) -> Response:
    """Writes `head` with the entries as its `data`; in pieces if it is long."""
    before, _, after = encode(head).partition(b'"data":[]')
    return written_list(entries, before + b'"data":[', b"]" + after)


def written_list(entries: Iterable[bytes], before: bytes = b"[", after: bytes = b"]") -> Response:
    """Writes a list of entries of JSON; in pieces, of which later ones are made in threads, if it is long."""
    pieces = _pieces(chain([before], _divided(entries), [after]))
    first = next(pieces)
    second = next(pieces, None)
    if second is None:
        return Response(first, media_type="application/json")
    return StreamingResponse(chain([first, second], pieces), media_type="application/json")


def _divided(entries: Iterable[bytes]) -> Iterator[bytes]:
    comma = b""
    for entry in entries:
        yield comma + entry
        comma = b","


def _pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    gathered: list[bytes] = []
    size = 0
    for part in parts:
        gathered.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
