"""A cache of exact vectors: a text that is asked for again is answered without the engine.

What the engine answers to tokens does not depend on what else it computes, so a vector that is kept has the
bits of a new one. Equal texts that come while one of them is computed wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from engine_core.client.in_flight import AddOptions
from engine_core.protocol import Pooled
from server.access.client_identity import of_later_texts
from server.metrics.server_metrics import Metrics
from server.options.server_config import ServerConfig
from server.requests.pooling import Item
from server.text.tokenizer import pack
from worker.protocol import Vectors
from worker.worker_facts import WorkerFacts

_OVERHEAD = 512
"""Bytes that an entry takes beside its numbers."""
_HOW_IT_RUNS = frozenset(
    {"priority", "owner", "weight", "max_running", "wait", "budget", "group", "streams", "times_each"}
)
"""Options of `Add` that decide when a text is computed, not what comes of it."""
_PACKER = msgspec.msgpack.Encoder(order="deterministic")

OnAnswer = Callable[[int, Pooled], None]


class Compute(Protocol):
    """Has the engine compute some texts, and calls back with the index and the answer of each as it comes."""

    def __call__(
        self, items: Sequence[Item], options: AddOptions, on_answer: OnAnswer | None = None, /
    ) -> Awaitable[list[Pooled]]: ...


def open_kept_vectors(config: ServerConfig, metrics: Metrics) -> KeptVectors | None:
    """The cache that an operator asks for, of which each API process has its part; None if none is wanted."""
    most_bytes = config.vectors.cache_bytes // max(1, config.api_server_count)
    return KeptVectors(most_bytes, metrics) if most_bytes else None


class KeptVectors:
    """The vectors used last, as many as so many bytes hold, and those that are being computed."""

    def __init__(self, most_bytes: int, metrics: Metrics) -> None:
        self._most_bytes, self._metrics = most_bytes, metrics
        self._bytes = 0
        self._kept: OrderedDict[bytes, Vectors] = OrderedDict()
        self._flights: dict[bytes, tuple[int, asyncio.Future[Vectors | None]]] = {}
        """The priority of each text that is being computed, and what comes of it: None if nothing does."""
        self._queries, self._hits = metrics.of_kept_vectors()

    def clear(self) -> None:
        """Forgets all vectors; what is being computed is not kept either."""
        self._kept.clear()
        self._flights.clear()
        self._bytes = 0

    async def pool(
        self, items: Sequence[Item], worker: WorkerFacts, options: AddOptions, compute: Compute
    ) -> list[Pooled]:
        """Returns the result of each item, in order, and computes those that are not there.

        A text waits for an equal one that another request has computed, unless that is less urgent; if the
        other request ends without it, this one computes it.
        """
        if not _can_be_kept(items, options):
            return await compute(items, options)
        keys, since = _keys(items, worker, options), time.monotonic()
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        self._queries.inc(len(keys))
        computed: dict[bytes, Pooled] = {}
        found: dict[bytes, Vectors] = {}
        while missing := [key for key in keys if key not in computed and key not in found]:
            found |= {key: vectors for key in missing if (vectors := self._get(key)) is not None}
            flights = self._flights_of(missing, options)
            own = {key: first[key] for key in missing if key not in found and key not in flights}
            if own:
                computed |= await self._compute(own, items, options, compute)
            if flights:
                await asyncio.wait(flights.values(), timeout=options.get("budget"))
                done = {key: flight.result() for key, flight in flights.items() if flight.done()}
                found |= {key: vectors for key, vectors in done.items() if vectors is not None}
                options = of_later_texts(options, time.monotonic() - since)
        seconds = time.monotonic() - since
        return [
            computed[key]
            if key in computed and first[key] == index
            else self._found(found.get(key) or computed[key].vectors, items[index].length, seconds)
            for index, key in enumerate(keys)
        ]

    def _get(self, key: bytes) -> Vectors | None:
        if (vectors := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
        return vectors

    def _flights_of(
        self, keys: Sequence[bytes], options: AddOptions
    ) -> dict[bytes, asyncio.Future[Vectors | None]]:
        """What is being computed of these texts by requests that are no less urgent than this one."""
        least, known = options.get("priority", 0), self._flights
        return {key: known[key][1] for key in keys if key in known and known[key][0] <= least}

    async def _compute(
        self, own: Mapping[bytes, int], items: Sequence[Item], options: AddOptions, compute: Compute
    ) -> dict[bytes, Pooled]:
        """Computes some of the items, for all who wait for their vectors."""
        loop, priority = asyncio.get_running_loop(), options.get("priority", 0)
        flights = [(key, (priority, loop.create_future())) for key in own]
        self._flights.update(flights)

        def note(index: int, answer: Pooled) -> None:
            key, flight = flights[index]
            flight[1].set_result(answer.vectors)
            if self._flights.get(key) is flight:  # or all was forgotten meanwhile
                del self._flights[key]
                self._put(key, answer.vectors)

        try:
            answers = await compute([items[index] for index in own.values()], options, note)
        finally:
            for key, flight in flights:
                if not flight[1].done():
                    flight[1].set_result(None)
                if self._flights.get(key) is flight:
                    del self._flights[key]
        return dict(zip(own, answers, strict=True))

    def _put(self, key: bytes, vectors: Vectors) -> None:
        if (size := _size(vectors)) > self._most_bytes:
            return
        self._kept[key] = vectors
        self._bytes += size
        while self._bytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= _size(dropped)

    def _found(self, vectors: Vectors, tokens: int, seconds: float) -> Pooled:
        self._hits.inc()
        self._metrics.pooled(tokens, tokens, seconds, None)
        return Pooled(id=0, vectors=vectors, cached=tokens)


def _can_be_kept(items: Sequence[Item], options: AddOptions) -> bool:
    """Whether tokens and parameters are all that the answers depend on, and answers are all that is asked."""
    return not any(item.media or item.params.late_query or item.params.late_document for item in items)


def _keys(items: Sequence[Item], worker: WorkerFacts, options: AddOptions) -> list[bytes]:
    """A digest of each text, of how it is pooled, and of whatever else decides what comes of it."""
    made_by = worker.fingerprint, str(worker.vectors)
    asked = {name: value for name, value in options.items() if name not in _HOW_IT_RUNS}
    params, begun, keys = None, blake2b(), list[bytes]()
    for item in items:
        if item.params is not params:
            params = item.params
            begun = blake2b(_PACKER.encode((made_by, asked, params)), digest_size=20)
        hash = begun.copy()
        hash.update(pack(item.tokens))
        keys.append(hash.digest())
    return keys


def _size(vectors: Vectors) -> int:
    return _OVERHEAD + len(vectors.data) + len(vectors.ids) + sum(map(_size, vectors.others.values()))
