"""`facet bench serve --beside`: how evenly streams run beside other work, and what that work gets meanwhile.

Each round measures both sides: the streams and the other work at the same time, and each of them alone.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count, islice

import msgspec
import uvloop

from server.bench.beside.clients import EmbeddingClients, Job
from server.bench.beside.samples import Samples, read_streams, time_prompt, time_texts
from server.bench.beside.summary import BesideResult, Round, figures, ratios, table, together
from server.bench.load.datasets import endless
from server.bench.load.endpoints import Outcome, Sender
from server.bench.load.http_client import Client, Model, first_model
from server.bench.serve_options import LoadOptions, write_result

_ROOM = 64
"""Tokens of the model's length that the long prompt leaves to a chat template and to the answer."""
_LONGEST_ALONE = 15.0
"""Seconds that the clients embed alone at most."""
_TEXTS_ALONE = 30
"""Single texts that are embedded one after the other where nothing runs beside them."""

Phase = Callable[[Samples, Samples], Awaitable[None]]
"""A part of a round, which adds to the samples taken alone and to those taken beside other work."""


def run(options: LoadOptions) -> int:
    result = uvloop.run(measure(options))
    print(table(result))
    write_result(options.output, result)
    return 0


async def measure(options: LoadOptions) -> BesideResult:
    async with _bench(options) as bench:
        taken = [await _round(bench, number) for number in range(options.others.rounds)]
    percentiles = options.metric_percentiles
    rounds = [Round(*(figures(side, percentiles) for side in sides)) for sides in taken]
    lengths = {"input_len": options.random_input_len, "output_len": options.random_output_len}
    return BesideResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=bench.model,
        endpoint="embeddings" if bench.bulk else options.kind,
        work={**msgspec.to_builtins(bench.options.others), **lengths, "seed": options.seed},
        alone=together([alone for alone, _ in taken], percentiles),
        beside=together([beside for _, beside in taken], percentiles),
        ratios=ratios(rounds),
        rounds=rounds,
    )


async def _round(bench: _Bench, number: int) -> tuple[Samples, Samples]:
    alone, beside = Samples(), Samples()
    phases = bench.phases()
    gc.collect()
    gc.disable()  # a pause here would pass for one of the server
    try:
        for phase in phases if number % 2 == 0 else reversed(phases):
            await phase(alone, beside)
    finally:
        gc.enable()
    return alone, beside


@asynccontextmanager
async def _bench(options: LoadOptions) -> AsyncIterator[_Bench]:
    client = Client(options.url, options.api_key, options.request_timeout)
    clients = None
    try:
        model = Model(options.model) if options.model else await first_model(client, options.url)
        embedder = await _embedder(options, model.id)
        clients = EmbeddingClients()
        bench = _Bench(_clipped(options, model), client, clients, model.id, embedder)
        await bench.warm_up()
        yield bench
    finally:
        client.close()
        if clients is not None:
            clients.close()


async def _embedder(options: LoadOptions, model: str) -> str:
    """The name of the model that embeds."""
    url = options.others.embed_base_url
    if url is None:
        return model
    client = Client(url, options.api_key, options.request_timeout)
    try:
        return (await first_model(client, url)).id
    finally:
        client.close()


def _clipped(options: LoadOptions, model: Model) -> LoadOptions:
    longest = options.others.long_prompt_len
    if model.max_model_len is not None:
        longest = max(1, min(longest, model.max_model_len - _ROOM))
    return msgspec.structs.replace(
        options, others=msgspec.structs.replace(options.others, long_prompt_len=longest)
    )


class _Bench:
    """One server, the streams that it is asked for and the clients that load it."""

    def __init__(
        self, options: LoadOptions, client: Client, clients: EmbeddingClients, model: str, embedder: str
    ) -> None:
        self.options, self.model = options, model
        self.bulk = "bulk" in options.others.beside
        self._client, self._clients, self._embedder = client, clients, embedder
        self._sender = Sender(client, model, options)
        self._salts = count()  # another one for whatever is sent, so that the prefix cache knows none of it
        self._window = _LONGEST_ALONE
        """Seconds that the clients embed alone: as long as the last streams took beside them."""

    def phases(self) -> Sequence[Phase]:
        if self.bulk:
            return [self._texts_alone, self._texts_beside, self._bulk_alone]
        return [self._streams_alone, self._streams_beside, self._others_alone]

    async def warm_up(self) -> None:
        if self.bulk:
            await self._embed_singly(Samples(), 2)
            return
        unused = Samples()
        await read_streams(unused, self._sender, self._streams(), None, 0)
        if "prompt" in self.options.others.beside:
            await time_prompt(unused, self._sender, self._prompt())

    # Streams.

    async def _streams_alone(self, alone: Samples, beside: Samples) -> None:
        await read_streams(alone, self._sender, self._streams(), None, 0)

    async def _streams_beside(self, alone: Samples, beside: Samples) -> None:
        prompt = self._prompt() if "prompt" in self.options.others.beside else None
        async with self._embedding(beside):
            begin = time.perf_counter()
            middle = self.options.random_output_len // 2
            await read_streams(beside, self._sender, self._streams(), prompt, middle)
            self._window = min(_LONGEST_ALONE, time.perf_counter() - begin)

    async def _others_alone(self, alone: Samples, beside: Samples) -> None:
        if "embeddings" in self.options.others.beside:
            async with self._embedding(alone):
                await asyncio.sleep(self._window)
        if "prompt" in self.options.others.beside:
            await time_prompt(alone, self._sender, self._prompt())

    @asynccontextmanager
    async def _embedding(self, samples: Samples) -> AsyncIterator[None]:
        """Lets the clients embed while the block runs, if they are to embed at all."""
        if "embeddings" not in self.options.others.beside:
            yield
            return
        others = self.options.others
        asked = self._asked(others.embed_batch_size, others.embed_input_len)
        await self._clients.begin(Job(asked, self._embedder, next(self._salts), others.embed_clients))
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        samples.add_texts(await self._clients.stop(), begin, end)

    def _streams(self) -> list[bytes]:
        works = endless(self.options, next(self._salts))
        return [self._sender.write(work) for work in islice(works, self.options.others.streams)]

    def _prompt(self) -> bytes:
        length = self.options.others.long_prompt_len
        asked = msgspec.structs.replace(
            self.options, dataset_name="random", random_input_len=length, random_output_len=1
        )
        return self._sender.write(next(endless(asked, next(self._salts))))

    # Single texts beside very many.

    async def _texts_alone(self, alone: Samples, beside: Samples) -> None:
        await self._embed_singly(alone, _TEXTS_ALONE)

    async def _texts_beside(self, alone: Samples, beside: Samples) -> None:
        await self._clients.begin(self._bulk_job())
        finishing = asyncio.create_task(self._clients.finish())
        await self._embed_singly(beside, None, finishing.done)
        self._add_bulk(beside, await finishing)

    async def _bulk_alone(self, alone: Samples, beside: Samples) -> None:
        await self._clients.begin(self._bulk_job())
        self._add_bulk(alone, await self._clients.finish())

    def _bulk_job(self) -> Job:
        asked = self._asked(self.options.others.bulk_batch_size, self.options.random_input_len)
        return Job(asked, self._embedder, next(self._salts), once=True)

    async def _embed_singly(
        self, samples: Samples, number: int | None, done: Callable[[], bool] = lambda: False
    ) -> None:
        asked = self._asked(1, self.options.random_input_len)
        sender = Sender(self._client, self._embedder, asked)
        messages = (sender.write(work) for work in islice(endless(asked, next(self._salts)), number))
        await time_texts(samples, sender, _until(done, messages))

    @staticmethod
    def _add_bulk(samples: Samples, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            samples.add_texts([outcome], outcome.due, outcome.ended)

    def _asked(self, batch_size: int, input_len: int) -> LoadOptions:
        """The options of requests for embeddings."""
        return msgspec.structs.replace(
            self.options,
            base_url=self.options.others.embed_base_url or self.options.url,
            endpoint="embeddings",
            dataset_name="random",
            random_batch_size=batch_size,
            random_input_len=input_len,
            random_range_ratio=0.0,
            random_prefix_len=0,
            extra_body={},
        )


def _until(done: Callable[[], bool], messages: Iterator[bytes]) -> Iterator[bytes]:
    for message in messages:
        if done():
            return
        yield message
