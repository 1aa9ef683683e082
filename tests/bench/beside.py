"""How evenly streams run beside other work, and what that work gets meanwhile.

    python tests/bench/beside.py --beside embeddings [--streams N] [--rounds N] [options of facet bench serve]

Each round measures both sides: the streams and the other work at the same time, and each of them alone.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, islice, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection

import msgspec
import uvloop
from beside_figures import MixedLoadResult, Round, Samples, figures, ratios, table
from beside_options import MixedLoadOptions, parse
from programs import run_program

from server.bench.answers import StreamedAnswer
from server.bench.endpoints import LoadRequest, Outcome, Sender, endless_requests
from server.bench.http_client import Client, Model, first_model
from server.bench.load_generator import without_garbage_collection
from server.bench.serve_options import BenchError, LoadOptions, write_result


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    options: LoadOptions
    """The server, and the texts of a request."""
    model: str
    salt: int
    clients: int | None
    """Clients that send requests without pause until they are told to stop; None sends a single request."""


class EmbeddingClients:
    """The process of the clients, as seen from the process that measures."""

    def __init__(self) -> None:
        spawn = get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    async def begin(self, job: EmbeddingJob) -> None:
        """Returns when every client has had an answer, or when a single request is about to go out."""
        self._connection.send(job)
        await self._receive()

    async def stop(self) -> list[Outcome]:
        self._connection.send(None)
        return await self.finish()

    async def finish(self) -> list[Outcome]:
        """Waits for the last answers. Raises BenchError if a request failed."""
        outcomes: list[Outcome] = await self._receive()
        check_outcomes(outcomes, "a request for embeddings")
        return outcomes

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._connection.close()

    async def _receive(self) -> list[Outcome]:
        try:
            return await asyncio.to_thread(self._connection.recv)
        except EOFError:
            raise BenchError("the process of the clients that embed has ended") from None


def check_outcomes(outcomes: Sequence[Outcome], what: str) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise BenchError(f"{what} failed: {outcome.error}{outcome.detail and f': {outcome.detail}'}")


def _run(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that measures closes the connection
    try:
        while True:
            connection.send(uvloop.run(_work(connection.recv(), connection)))
    except (EOFError, OSError):
        pass  # the process that measures has ended


async def _work(job: EmbeddingJob, connection: Connection) -> list[Outcome]:
    requests = endless_requests(job.options, job.salt)
    with closing(Client(job.options.url, job.options.api_key, job.options.request_timeout)) as client:
        sender = Sender(client, job.model, job.options)
        if job.clients is not None:
            return await _without_pause(job.clients, requests, sender, connection)
        request = next(requests)
        message = sender.write(request)
        connection.send([])
        return [await sender.send(message, len(request.texts), time.perf_counter())]


async def _without_pause(
    clients: int, requests: Iterator[LoadRequest], sender: Sender, connection: Connection
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    unanswered = set(range(clients))

    async def one(number: int) -> None:
        while not connection.poll():
            request = next(requests)
            outcome = await sender.send(sender.write(request), len(request.texts), time.perf_counter())
            outcomes.append(outcome)
            if number in unanswered:
                unanswered.remove(number)
                if not unanswered:
                    connection.send([])
            if outcome.error is not None:
                return

    await asyncio.gather(*(one(number) for number in range(clients)))
    connection.recv()  # the word to stop
    return outcomes


_ROOM = 64
"""Tokens of the model's length that the long prompt leaves to a chat template and to the answer."""
_LONGEST_ALONE = 15.0
"""Seconds that the clients embed alone at most."""
_TEXTS_ALONE = 30
"""Single texts that are embedded one after the other where nothing runs beside them."""
_TICK = 0.005
"""Seconds between two looks at the clock, or at a stream that another request waits for."""
_PAUSE = 0.1
"""Seconds between single texts: without them few quick moments would outnumber long slow ones."""

Phase = Callable[[Samples], Awaitable[None]]
"""A part of a round, which adds to the samples of one side."""


def run(arguments: Sequence[str], command: str) -> int:
    options = parse(arguments, command)
    result = uvloop.run(measure(options.load, options.mixed))
    print(table(result))
    write_result(options.load.output, result)
    return 0


async def measure(options: LoadOptions, mixed: MixedLoadOptions) -> MixedLoadResult:
    with closing(Client(options.url, options.api_key, options.request_timeout)) as client:
        model = Model(options.model) if options.model else await first_model(client, options.url)
        embedder = await _embedding_model(options, mixed) or model.id
        with closing(EmbeddingClients()) as clients:
            bench = _MixedLoad(options, _fitted(mixed, model), client, clients, model.id, embedder)
            await bench.warm_up()
            taken = [await _round(bench, number) for number in range(mixed.rounds)]
    percentiles = options.metric_percentiles
    rounds = [Round(*(figures([side], percentiles) for side in sides)) for sides in taken]
    lengths = {"input_len": options.random_input_len, "output_len": options.random_output_len}
    return MixedLoadResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model.id,
        endpoint="embeddings" if bench.is_bulk else options.kind,
        work={**msgspec.to_builtins(bench.mixed), **lengths, "seed": options.seed},
        alone=figures([alone for alone, _ in taken], percentiles),
        beside=figures([beside for _, beside in taken], percentiles),
        ratios=ratios(rounds),
        rounds=rounds,
    )


async def _embedding_model(options: LoadOptions, mixed: MixedLoadOptions) -> str | None:
    """The name of the model of the server that embeds, if that is another one."""
    url = mixed.embed_base_url
    if url is None:
        return None
    with closing(Client(url, options.api_key, options.request_timeout)) as client:
        return (await first_model(client, url)).id


def _fitted(mixed: MixedLoadOptions, model: Model) -> MixedLoadOptions:
    """The options with a long prompt that the model can take."""
    if model.max_model_len is None:
        return mixed
    longest = max(1, min(mixed.long_prompt_len, model.max_model_len - _ROOM))
    return msgspec.structs.replace(mixed, long_prompt_len=longest)


async def _round(bench: _MixedLoad, number: int) -> tuple[Samples, Samples]:
    """Every second round measures in the opposite order."""
    alone, beside = Samples(), Samples()
    phases = bench.phases(alone, beside)
    with without_garbage_collection():
        for samples, phase in phases if number % 2 == 0 else reversed(phases):
            await phase(samples)
    return alone, beside


class _MixedLoad:
    """One server, the streams that it is asked for and the clients that load it."""

    def __init__(
        self,
        options: LoadOptions,
        mixed: MixedLoadOptions,
        client: Client,
        clients: EmbeddingClients,
        model: str,
        embedder: str,
    ) -> None:
        self.options, self.mixed = options, mixed
        self.is_bulk = "bulk" in mixed.beside
        self._client, self._clients, self._embedder = client, clients, embedder
        self._sender = Sender(client, model, options)
        self._salts = count()  # another one for whatever is sent, so that the prefix cache knows none of it
        self._window = _LONGEST_ALONE
        """Seconds that the clients embed alone: as long as the last streams took beside them."""

    def phases(self, alone: Samples, beside: Samples) -> Sequence[tuple[Samples, Phase]]:
        """The phases of a round, and to which samples each of them adds."""
        if self.is_bulk:
            return [(alone, self._embed_texts), (beside, self._embed_beside), (alone, self._embed_bulk)]
        return [(alone, self._read_streams), (beside, self._read_beside), (alone, self._others)]

    async def warm_up(self) -> None:
        unused = Samples()
        if self.is_bulk:
            await self._embed_singly(unused, 2)
            return
        await self._read_streams(unused)
        if "prompt" in self.mixed.beside:
            await _time_prompt(unused, self._sender, self._prompt())

    # Streams.

    async def _read_streams(self, samples: Samples) -> None:
        await _read_streams(samples, self._sender, self._streams(), None, 0)

    async def _read_beside(self, samples: Samples) -> None:
        prompt = self._prompt() if "prompt" in self.mixed.beside else None
        async with self._embedding(samples):
            begin = time.perf_counter()
            middle = self.options.random_output_len // 2
            await _read_streams(samples, self._sender, self._streams(), prompt, middle)
            self._window = min(_LONGEST_ALONE, time.perf_counter() - begin)

    async def _others(self, samples: Samples) -> None:
        """The work that streams run beside, by itself."""
        if "embeddings" in self.mixed.beside:
            async with self._embedding(samples):
                await asyncio.sleep(self._window)
        if "prompt" in self.mixed.beside:
            await _time_prompt(samples, self._sender, self._prompt())

    @asynccontextmanager
    async def _embedding(self, samples: Samples) -> AsyncIterator[None]:
        """Lets the clients embed while the block runs, if they are to embed at all."""
        mixed = self.mixed
        if "embeddings" not in mixed.beside:
            yield
            return
        await self._clients.begin(
            self._job(mixed.embed_batch_size, mixed.embed_input_len, mixed.embed_clients)
        )
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        samples.add_texts(await self._clients.stop(), begin, end)

    def _streams(self) -> list[bytes]:
        requests = endless_requests(self.options, next(self._salts))
        return [self._sender.write(one) for one in islice(requests, self.mixed.streams)]

    def _prompt(self) -> bytes:
        length = self.mixed.long_prompt_len
        asked = msgspec.structs.replace(
            self.options, dataset_name="random", random_input_len=length, random_output_len=1
        )
        return self._sender.write(next(endless_requests(asked, next(self._salts))))

    # Single texts beside very many.

    async def _embed_texts(self, samples: Samples) -> None:
        await self._embed_singly(samples, _TEXTS_ALONE)

    async def _embed_beside(self, samples: Samples) -> None:
        await self._clients.begin(self._bulk_job())
        finishing = asyncio.create_task(self._clients.finish())
        await self._embed_singly(samples, None, finishing.done)
        _add_bulk(samples, await finishing)

    async def _embed_bulk(self, samples: Samples) -> None:
        await self._clients.begin(self._bulk_job())
        _add_bulk(samples, await self._clients.finish())

    def _bulk_job(self) -> EmbeddingJob:
        return self._job(self.mixed.bulk_batch_size, self.options.random_input_len, clients=None)

    async def _embed_singly(
        self, samples: Samples, number: int | None, is_done: Callable[[], bool] = lambda: False
    ) -> None:
        """Embeds one text after the other, with a pause between them: so many, or until it is done."""
        job = self._job(1, self.options.random_input_len, clients=None)
        sender = Sender(self._client, job.model, job.options)
        async with timed_ticks(samples.lateness):
            for request in islice(endless_requests(job.options, job.salt), number):
                if is_done():
                    return
                outcome = await sender.send(sender.write(request), 1, time.perf_counter())
                check_outcomes([outcome], "a text")
                samples.latency.append(outcome.e2el)
                await asyncio.sleep(_PAUSE)

    def _job(self, batch_size: int, input_len: int, clients: int | None) -> EmbeddingJob:
        """Requests for embeddings of new texts: by so many clients without pause, or a single one."""
        options = msgspec.structs.replace(
            self.options,
            base_url=self.mixed.embed_base_url or self.options.url,
            endpoint="embeddings",
            dataset_name="random",
            random_batch_size=batch_size,
            random_input_len=input_len,
            random_range_ratio=0.0,
            random_prefix_len=0,
            extra_body={},
        )
        return EmbeddingJob(options, self._embedder, next(self._salts), clients)


def _add_bulk(samples: Samples, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        samples.add_texts([outcome], outcome.due, outcome.ended)


async def _read_streams(
    samples: Samples, sender: Sender, streams: Sequence[bytes], prompt: bytes | None, middle: int
) -> None:
    """Reads streams to their ends; `prompt` goes out when the first one has given `middle` chunks."""
    answers = [StreamedAnswer() for _ in streams]
    async with timed_ticks(samples.lateness):
        tasks = [
            asyncio.create_task(sender.send(message, 1, time.perf_counter(), answer))
            for message, answer in zip(streams, answers, strict=True)
        ]
        if prompt is not None:
            while len(answers[0].times) < middle and not tasks[0].done():
                await asyncio.sleep(_TICK)
            await _time_prompt(samples, sender, prompt)
        outcomes = await asyncio.gather(*tasks)
    check_outcomes(outcomes, "a stream")
    for outcome in outcomes:
        samples.ttft.append(outcome.times[0] - outcome.due)
        samples.gaps += gaps(outcome.times)


async def _time_prompt(samples: Samples, sender: Sender, prompt: bytes) -> None:
    outcome = await sender.send(prompt, 1, time.perf_counter())
    check_outcomes([outcome], "the long prompt")
    samples.prompt_ttft.append(outcome.times[0] - outcome.due)


def gaps(times: Iterable[float]) -> list[float]:
    """The seconds between chunks, of which those that were read together count as one."""
    return [later - earlier for earlier, later in pairwise(sorted(set(times)))]


@asynccontextmanager
async def timed_ticks(lateness: list[float]) -> AsyncIterator[None]:
    """Keeps note of how late this process's timers are while the block runs."""

    async def tick() -> None:
        while True:
            due = time.perf_counter() + _TICK
            await asyncio.sleep(_TICK)
            lateness.append(max(0.0, time.perf_counter() - due))

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()


if __name__ == "__main__":
    sys.exit(run_program(run, "beside.py"))
