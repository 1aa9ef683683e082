"""How evenly streams run beside other work, and what that work gets meanwhile.

    python tests/bench/beside.py --beside embeddings [--streams N] [--rounds N] [options of facet bench serve]

Each round measures both sides: the streams and the other work at the same time, and each of them alone.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, fields
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvloop
from embedding_clients import Job
from programs import run_program

from server.bench.answers import StreamedAnswer
from server.bench.endpoints import Outcome, Sender, endless_requests
from server.bench.http_client import Client, Model, first_model
from server.bench.load_generator import spread, without_garbage_collection
from server.bench.serve_options import BenchError, LoadOptions, check_load, read_values, write_result
from server.options.option_parsing import OptionDoc, OptionError, assemble, options_of
from server.terminal.console import aligned

_BESIDE = "Streams beside other work"
_KINDS = ("embeddings", "prompt", "bulk")
_OF_STREAMS = {"random_input_len": 32, "random_output_len": 200, "ignore_eos": True}
"""Defaults of a plain load's options that are others here."""
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
_TEXT_RATE = "texts/s"


class Work(msgspec.Struct, frozen=True, kw_only=True):
    beside: Annotated[list[str], OptionDoc(_BESIDE, _KINDS)] = []
    """Clients that embed texts without pause, a long prompt in the middle of the streams, or both; bulk
    measures single texts to embed beside one request with very many."""
    streams: Annotated[int, OptionDoc(_BESIDE, least=1)] = 1
    """Streams at once."""
    rounds: Annotated[int, OptionDoc(_BESIDE, least=1)] = 3
    """How often everything is measured, beside and alone."""
    embed_base_url: Annotated[str | None, OptionDoc(_BESIDE)] = None
    """Address of the server that embeds, if it is another one."""
    embed_clients: Annotated[int, OptionDoc(_BESIDE, least=1)] = 2
    """Clients that embed without pause."""
    embed_batch_size: Annotated[int, OptionDoc(_BESIDE, least=1)] = 4
    """Texts in each of their requests."""
    embed_input_len: Annotated[int, OptionDoc(_BESIDE, least=1)] = 200
    """Tokens of each of these texts."""
    long_prompt_len: Annotated[int, OptionDoc(_BESIDE, least=1)] = 3000
    """Tokens of the long prompt, if the model takes so many."""
    bulk_batch_size: Annotated[int, OptionDoc(_BESIDE, least=1)] = 10000
    """Texts in the request of bulk, each of --random-input-len tokens."""


class BesideOptions(msgspec.Struct, frozen=True, kw_only=True):
    work: Work = msgspec.field(default_factory=Work)
    load: LoadOptions = msgspec.field(default_factory=LoadOptions)


def parse(arguments: Sequence[str], command: str) -> BesideOptions:
    values = read_values(arguments, command, options_of(BesideOptions))
    options = assemble(BesideOptions, {**_OF_STREAMS, **values})
    check_load(options.load)
    kinds = options.work.beside
    if not kinds or ("bulk" in kinds and len(kinds) > 1):
        raise OptionError("--beside says what runs beside the streams: embeddings, prompt, both, or bulk")
    return options


@dataclass(slots=True)
class Samples:
    """Times in seconds of one side, alone or beside other work, and the texts embedded meanwhile."""

    gaps: list[float] = field(default_factory=list[float])
    """Times between a stream's chunks; chunks that were read together count as one."""
    ttft: list[float] = field(default_factory=list[float])
    """Times to the first token of the streams."""
    prompt_ttft: list[float] = field(default_factory=list[float])
    """Times to the first token of the long prompts."""
    latency: list[float] = field(default_factory=list[float])
    """Times to the answers with a single text's vector."""
    lateness: list[float] = field(default_factory=list[float])
    """How late timers of this process were: it cannot see shorter gaps than these."""
    texts: float = 0.0
    text_seconds: float = 0.0
    """The time in which so many texts were embedded."""

    def add_texts(self, outcomes: Iterable[Outcome], begin: float, end: float) -> None:
        """Counts the texts embedded from `begin` to `end`, of each request as much as lies between them."""
        self.text_seconds += end - begin
        for outcome in outcomes:
            within = min(outcome.ended, end) - max(outcome.due, begin)
            self.texts += outcome.inputs * max(0.0, within) / outcome.e2el

    def figures(self, percentiles: Sequence[float]) -> dict[str, float]:
        """Every figure by a name, such as "gaps p99"; times in milliseconds."""
        found: dict[str, float] = {}
        for metric in ("gaps", "ttft", "prompt_ttft", "latency", "lateness"):
            if one := spread(getattr(self, metric), percentiles):
                found |= {f"{metric} {name}": value for name, value in one.percentiles.items()}
                found[f"{metric} max"] = one.most
        return found | ({_TEXT_RATE: self.texts / self.text_seconds} if self.text_seconds else {})

    @classmethod
    def together(cls, samples: Iterable[Samples]) -> Samples:
        whole = cls()
        for each in samples:
            for name in (one.name for one in fields(cls)):
                setattr(whole, name, getattr(whole, name) + getattr(each, name))
        return whole


Sides = tuple[Samples, Samples]
"""One round: alone, and beside other work."""


def result_of(rounds: Sequence[Sides], percentiles: Sequence[float]) -> dict[str, Any]:
    """The figures of all rounds together and of each, and the ratios beside / alone within rounds."""
    each = [[side.figures(percentiles) for side in sides] for sides in rounds]
    ratios: dict[str, list[float]] = {}
    for alone, beside in each:
        for name in beside:
            if alone.get(name):
                ratios.setdefault(name, []).append(beside[name] / alone[name])
    whole = [Samples.together(side).figures(percentiles) for side in zip(*rounds, strict=True)]
    return {
        "alone": whole[0],
        "beside": whole[1],
        "ratios": {name: (statistics.median(of), min(of), max(of)) for name, of in ratios.items()},
        "rounds": [dict(zip(("alone", "beside"), sides, strict=True)) for sides in each],
    }


def table(result: dict[str, Any]) -> str:
    rows = [["", "alone", "beside", "beside / alone"]]
    for name in {**result["alone"], **result["beside"]}:
        values = [f"{side[name]:.2f}" if name in side else "" for side in (result["alone"], result["beside"])]
        median, least, most = result["ratios"].get(name, (0.0, 0.0, 0.0))
        rows.append([name, *values, f"{median:.2f} ({least:.2f} to {most:.2f})" if median else ""])
    return "\n".join(aligned(rows))


class EmbeddingClients:
    """The process of the clients, as seen from the process that measures."""

    async def start(self) -> None:
        program, pipe = str(Path(__file__).with_name("embedding_clients.py")), asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, program, stdin=pipe, stdout=pipe, limit=1 << 26
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout

    async def begin(self, job: Job) -> None:
        """Returns when every client has had an answer, or when a single request goes out."""
        self._commands.write(msgspec.json.encode(job) + b"\n")
        await self._read()

    async def stop(self) -> list[Outcome]:
        self._commands.write(b"\n")
        return await self.finish()

    async def finish(self) -> list[Outcome]:
        """Waits for the last answers. Raises BenchError if a request failed."""
        outcomes = msgspec.json.decode(await self._read(), type=list[Outcome])
        check_outcomes(outcomes, "a request for embeddings")
        return outcomes

    async def close(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def _read(self) -> bytes:
        line = await self._answers.readline()
        if not line:
            raise BenchError("the process of the clients that embed has ended")
        return line


def check_outcomes(outcomes: Sequence[Outcome], what: str) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise BenchError(f"{what} failed: {outcome.error}{outcome.detail and f': {outcome.detail}'}")


class Bench:
    """One server, the streams that it is asked for and the clients that load it."""

    def __init__(
        self, options: BesideOptions, client: Client, clients: EmbeddingClients, model: Model, embedder: str
    ) -> None:
        self.load, self.work = options.load, options.work
        self._client, self._clients, self._embedder = client, clients, embedder
        self._sender = Sender(client, model.id, self.load)
        self._longest = max(1, (model.max_model_len or 1 << 30) - _ROOM)
        self._salts = count()  # another one for whatever is sent, so that the prefix cache knows none of it
        self._window = _LONGEST_ALONE
        """Seconds that the clients embed alone: as long as the last streams took beside them."""

    async def round(self, number: int) -> Sides:
        """Every second round measures in the opposite order."""
        alone, beside = Samples(), Samples()
        phases: list[tuple[Samples, Callable[[Samples], Awaitable[None]]]]
        phases = [(alone, self.streams_alone), (beside, self.streams_beside), (alone, self.others_alone)]
        if "bulk" in self.work.beside:
            phases = [(alone, self.single_texts), (beside, self.texts_beside), (alone, self.bulk_alone)]
        with without_garbage_collection():
            for samples, phase in phases if number % 2 == 0 else reversed(phases):
                await phase(samples)
        return alone, beside

    async def warm_up(self) -> None:
        unused = Samples()
        if "bulk" in self.work.beside:
            await self.single_texts(unused, most=2)
            return
        await self.streams_alone(unused)
        if "prompt" in self.work.beside:
            await self._time_prompt(unused)

    async def streams_alone(self, samples: Samples) -> None:
        await self._read_streams(samples, with_prompt=False)

    async def streams_beside(self, samples: Samples) -> None:
        async with self._embedding(samples):
            begin = time.perf_counter()
            await self._read_streams(samples, with_prompt="prompt" in self.work.beside)
            self._window = min(_LONGEST_ALONE, time.perf_counter() - begin)

    async def others_alone(self, samples: Samples) -> None:
        if "embeddings" in self.work.beside:
            async with self._embedding(samples):
                await asyncio.sleep(self._window)
        if "prompt" in self.work.beside:
            await self._time_prompt(samples)

    async def _read_streams(self, samples: Samples, *, with_prompt: bool) -> None:
        """Reads streams to their ends; a prompt goes out when the first one has given half of its chunks."""
        requests = endless_requests(self.load, next(self._salts))
        messages = [self._sender.write(one) for one in islice(requests, self.work.streams)]
        answers = [StreamedAnswer() for _ in messages]
        async with timed_ticks(samples.lateness):
            tasks = [
                asyncio.create_task(self._sender.send(message, 1, time.perf_counter(), answer))
                for message, answer in zip(messages, answers, strict=True)
            ]
            if with_prompt:
                while len(answers[0].times) < self.load.random_output_len // 2 and not tasks[0].done():
                    await asyncio.sleep(_TICK)
                await self._time_prompt(samples)
            outcomes = await asyncio.gather(*tasks)
        check_outcomes(outcomes, "a stream")
        for outcome in outcomes:
            samples.ttft.append(outcome.times[0] - outcome.due)
            samples.gaps += [later - earlier for earlier, later in pairwise(sorted(set(outcome.times)))]

    async def _time_prompt(self, samples: Samples) -> None:
        length = min(self.work.long_prompt_len, self._longest)
        asked = msgspec.structs.replace(
            self.load, dataset_name="random", random_input_len=length, random_output_len=1
        )
        message = self._sender.write(next(endless_requests(asked, next(self._salts))))
        outcome = await self._sender.send(message, 1, time.perf_counter())
        check_outcomes([outcome], "the long prompt")
        samples.prompt_ttft.append(outcome.times[0] - outcome.due)

    @asynccontextmanager
    async def _embedding(self, samples: Samples) -> AsyncIterator[None]:
        """Lets the clients embed while the block runs, if they are to embed at all."""
        work = self.work
        if "embeddings" not in work.beside:
            yield
            return
        await self._clients.begin(self._job(work.embed_batch_size, work.embed_input_len, work.embed_clients))
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        samples.add_texts(await self._clients.stop(), begin, end)

    # Single texts beside very many.

    async def single_texts(
        self, samples: Samples, most: int | None = _TEXTS_ALONE, is_done: Callable[[], bool] = lambda: False
    ) -> None:
        """Embeds one text after the other, with a pause between them: so many, or until it is done."""
        job = self._job(1, self.load.random_input_len)
        sender = Sender(self._client, job.model, job.options)
        async with timed_ticks(samples.lateness):
            for request in islice(endless_requests(job.options, job.salt), most):
                if is_done():
                    return
                outcome = await sender.send(sender.write(request), 1, time.perf_counter())
                check_outcomes([outcome], "a text")
                samples.latency.append(outcome.e2el)
                await asyncio.sleep(_PAUSE)

    async def texts_beside(self, samples: Samples) -> None:
        finishing = await self._begin_bulk()
        await self.single_texts(samples, None, finishing.done)
        self._add_bulk(samples, await finishing)

    async def bulk_alone(self, samples: Samples) -> None:
        self._add_bulk(samples, await (await self._begin_bulk()))

    async def _begin_bulk(self) -> asyncio.Task[list[Outcome]]:
        await self._clients.begin(self._job(self.work.bulk_batch_size, self.load.random_input_len))
        return asyncio.create_task(self._clients.finish())

    def _add_bulk(self, samples: Samples, outcomes: list[Outcome]) -> None:
        [outcome] = outcomes
        samples.add_texts(outcomes, outcome.due, outcome.ended)

    def _job(self, batch_size: int, input_len: int, clients: int = 0) -> Job:
        options = LoadOptions(
            base_url=self.work.embed_base_url or self.load.url,
            api_key=self.load.api_key,
            request_timeout=self.load.request_timeout,
            request_rate=(1.0,),  # which nobody asks for: infinity is no JSON
            endpoint="embeddings",
            seed=self.load.seed,
            random_batch_size=batch_size,
            random_input_len=input_len,
            random_vocab_size=self.load.random_vocab_size,
        )
        return Job(options, self._embedder, next(self._salts), clients)


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


async def measure(options: BesideOptions) -> dict[str, Any]:
    load, work = options.load, options.work
    with closing(Client(load.url, load.api_key, load.request_timeout)) as client:
        model = Model(load.model) if load.model else await first_model(client, load.url)
        embedder = model.id
        if work.embed_base_url:
            with closing(Client(work.embed_base_url, load.api_key, load.request_timeout)) as other:
                embedder = (await first_model(other, work.embed_base_url)).id
        clients = EmbeddingClients()
        await clients.start()
        try:
            bench = Bench(options, client, clients, model, embedder)
            await bench.warm_up()
            rounds = [await bench.round(number) for number in range(work.rounds)]
        finally:
            await clients.close()
    about = {"model": model.id, "work": msgspec.to_builtins(work)}
    return about | result_of(rounds, load.metric_percentiles)


def run(arguments: Sequence[str], command: str) -> int:
    options = parse(arguments, command)
    result = uvloop.run(measure(options))
    print(table(result))
    write_result(options.load.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(run, "beside.py"))
