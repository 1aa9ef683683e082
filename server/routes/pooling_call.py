"""A pooling request while it is answered: its checks, running its texts, usage, very long answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from engine_core.protocol import Pooled
from server.access.admission import Admission
from server.access.request_state import Attributes, state_of
from server.http.sse import encode
from server.model_facts import OUTPUTS
from server.reading.body_table import PoolingRequestBody
from server.requests.pooling import PooledText
from server.requests.scoring import Compared, compute_scores
from server.requests.text_windows import join_windows
from server.routes.request_context import EngineCall, frontend_of
from server.schemas.pooling_bodies import PooledList
from server.schemas.sampling_fields import Usage
from worker.protocol import Pooling, Vectors

PIECE_BYTES = 256 << 10
"""An answer longer than this many bytes is written in pieces, so that it is never in memory as a whole."""

NAMES = {task: name for name, task in OUTPUTS.items()}
"""The names of outputs by their tasks."""

T = TypeVar("T")


def require_outputs(request: Request, params: Pooling) -> None:
    """Require the right to each of the outputs that a body names."""
    for task in (params.task, *params.outputs):
        if task != "align":  # whose right is checked where recordings are
            state_of(request.scope).require_right(task)


class PoolingCall(EngineCall):
    """A pooling request while it is answered."""

    def __init__(self, request: Request, body: PoolingRequestBody, prefix: str = "") -> None:
        terms, frontend = body.terms, frontend_of(request)
        self._truncation = body.truncation(frontend.facts)
        frontend.check_model(terms.model)
        super().__init__(request, terms, prefix)
        self.tokens = self._media = 0
        self.request = request
        self._group = frontend.new_group()
        self._admission: Admission | None = None
        self.state.work = self

    def describe(self) -> Attributes:
        tokens = {"gen_ai.usage.prompt_tokens": self.tokens, "gen_ai.usage.completion_tokens": 0}
        return {**super().describe(), **tokens}

    async def run(self, items: Sequence[PooledText]) -> list[Vectors]:
        """The vectors of these texts, in order."""
        if not any(item.windows for item in items):
            return [answer.vectors for answer in await self.compute(items)]
        parts = [[item, *item.windows] for item in items]
        answers = iter(await self.compute([window for windows in parts for window in windows]))
        found = [[next(answers).vectors for _ in windows] for windows in parts]
        return [
            join_windows(item, own, self.facts) if item.windows else own[0]
            for item, own in zip(items, found, strict=True)
        ]

    async def compute(self, items: Sequence[PooledText]) -> list[Pooled]:
        """What the engine answers to each of these texts."""
        admission = self.admit(len(items))
        options = self.terms.add_options(admission, begun=self.tokens > 0)
        options["group"] = self._group
        tokens = sum([item.length for item in items])
        admission.check_tokens(tokens)
        admission.read(tokens)
        self.times.submit()
        answers = await self.frontend.pool(
            items,
            request_id=self.id,
            replica=self.terms.replica,
            admission=admission,
            media_items=self.state.media_items,
            **options,
        )
        self.times.add_round(answers)
        self.tokens += tokens
        self._media += sum([placed.embeddings for item in items for placed in item.media])
        self.times.cached_tokens += sum(answer.cached for answer in answers)
        return answers

    async def score(self, compared: Compared) -> list[float]:
        self.admit(len(compared.documents))
        return await compute_scores(compared, self.facts, self.run)

    def usage(self) -> Usage:
        return self._usage(self.tokens, self.times.cached_tokens, self._media)

    def answer(self, entries: Iterable[msgspec.Struct]) -> Response:
        """The answer in the shape of the OpenAI API: a list with an entry for each text."""
        head = PooledList(
            id=self.id,
            created=self.created,
            model=self.model,
            usage=self.usage(),
        )
        return list_response(head, map(encode, entries))

    def admit(self, texts: int) -> Admission:
        """Lets the request in with so many texts. Later calls change nothing."""
        if self._admission is None:
            places = self.frontend.places_for(texts, self.state.caller)
            self._admission = self.state.admit(self.frontend.admissions, places)
            self.id = self._admission.take_id(self.id)
        return self._admission


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
