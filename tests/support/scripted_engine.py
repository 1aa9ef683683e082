"""Engines that are scripted by a test, and the client that they serve, in one event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq
from model_facts import READY as SMALL
from model_facts import changed

from engine_core.client.client import EngineClient
from engine_core.client.in_flight import Stream
from engine_core.config import Address, Replicas
from engine_core.engine_stats import Stats
from engine_core.protocol import Answer, Outputs, Request, Tokens
from engine_core.wire.transport import EngineEnd
from worker.protocol import Sampling

PARAMS = Sampling(max_tokens=5)
NO_WORK = Stats(
    **dict.fromkeys(("running", "waiting", "prefix_queries", "prefix_hits"), 0),
    **dict.fromkeys(("preemptions", "steps", "step_tokens"), 0),
    kv_usage=0.0,
)
READY = changed(SMALL, num_blocks=1000, vocab_size=50)


class Script:
    """An engine that sends the answers that the test gives it."""

    def __init__(self, address: Address, number: int = 0) -> None:
        self.number = number
        self._context = zmq.Context()
        self._end = EngineEnd(self._context, address, engine=number)

    def send(self, *answers: Answer) -> None:
        for answer in answers:
            self._end.send(answer)

    def answer(self, stream: Stream[Any], *tokens: int, **more: Any) -> None:
        self.send(Outputs([Tokens(id=stream.id, tokens=list(tokens), **more)]))

    async def received(self, count: int) -> list[Request]:
        requests: list[Request] = []
        async with asyncio.timeout(60):
            while len(requests) < count:
                requests += self._end.requests.read()
                await asyncio.sleep(0.001)
        return requests

    def close(self) -> None:
        self._end.close()
        self._context.term()


async def all_of(stream: Stream[Any]) -> list[Any]:
    """The answers of a stream until its end."""
    async with asyncio.timeout(60):
        return [output async for output in stream]


async def next_of(stream: Stream[Any]) -> Any:
    async with asyncio.timeout(60):
        return await anext(stream)


class Replicated:
    """A client, and a scripted engine for each of its replicas."""

    def __init__(self, address: Address, layout: Replicas, **options: Any) -> None:
        self.address = address
        self.client = EngineClient(address, layout, **options)
        self.scripts: list[Script] = []

    async def start(self, number: int, at: Address | None = None, **facts: Any) -> Script:
        """Start a replica, and wait until the client knows that it is ready."""
        script = Script(at or self.address, number)
        self.scripts.append(script)
        script.send(changed(READY, **facts))
        await self.until(lambda: self.state(number) == "works")
        return script

    def state(self, number: int) -> str:
        found = [one for one in self.client.replicas if one.number == number]
        if not found:
            return "unknown"
        return found[0].lost or ("works" if found[0].works else "begins")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)

    def end(self, script: Script) -> None:
        """End the process of a replica, as the client sees it."""
        self.scripts.remove(script)
        script.close()

    def close(self) -> None:
        self.client.close()
        for script in self.scripts:
            script.close()


Connect = Callable[..., Replicated]
"""The type of a function that makes a client of so many replicas, by options, which is closed in the end."""

Two = tuple[EngineClient, Script, Script, Replicated]
"""The client, its two engines in the order of their numbers, and all of them together."""
