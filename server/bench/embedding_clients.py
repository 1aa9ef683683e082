"""Clients that embed texts in a process of their own, so that no reader of streams waits for them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import uvloop

from server.bench.datasets import LoadRequest, endless_requests
from server.bench.endpoints import Outcome, Sender
from server.bench.http_client import Client
from server.bench.serve_options import BenchError, LoadOptions


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
