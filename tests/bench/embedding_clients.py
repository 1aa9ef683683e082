"""Clients that embed new texts, in a process of their own, which `beside.py` starts.

It reads lines. Each is a job in JSON, and a line goes back when every client has had an answer, or when the
only request goes out. Clients that ask without pause stop at an empty line. Then all outcomes go back.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import closing

import msgspec
import uvloop

from server.bench.endpoints import LoadRequest, Outcome, Sender, endless_requests
from server.bench.http_client import Client
from server.bench.serve_options import LoadOptions


class Job(msgspec.Struct, frozen=True):
    options: LoadOptions
    """The server, and the texts of a request."""
    model: str
    salt: int
    clients: int
    """Clients that send requests without pause; 0: one request is sent."""


async def work(job: Job, lines: asyncio.StreamReader) -> list[Outcome]:
    requests = endless_requests(job.options, job.salt)
    unanswered, outcomes = set(range(job.clients)), list[Outcome]()
    with closing(Client(job.options.url, job.options.api_key, job.options.request_timeout)) as client:
        sender = Sender(client, job.model, job.options)

        async def ask(request: LoadRequest) -> Outcome:
            outcomes.append(await sender.send(sender.write(request), len(request.texts), time.perf_counter()))
            return outcomes[-1]

        async def ask_without_pause(number: int) -> None:
            while not stopped.done():
                outcome = await ask(next(requests))
                if number in unanswered:
                    unanswered.remove(number)
                    if not unanswered:
                        print("begun", flush=True)
                if outcome.error is not None:
                    return

        if not job.clients:
            print("begun", flush=True)
            await ask(next(requests))
            return outcomes
        stopped = asyncio.create_task(lines.readline())
        await asyncio.gather(*map(ask_without_pause, range(job.clients)))
        await stopped
    return outcomes


async def main() -> None:
    lines = asyncio.StreamReader(limit=1 << 24)
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await lines.readline():
        outcomes = await work(msgspec.json.decode(line, type=Job), lines)
        print(msgspec.json.encode(outcomes).decode(), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that measures ends this one
    uvloop.run(main())
