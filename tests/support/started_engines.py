"""Engines that a test has started in processes of their own: to wait for them and read their streams."""

import asyncio
from collections.abc import Awaitable, Callable

from engine_core.client.client import EngineClient
from engine_core.client.in_flight import Stream
from engine_core.engine_children import EngineProcesses
from engine_core.protocol import Failed, Tokens

Start = Callable[..., Awaitable[tuple[EngineProcesses, EngineClient]]]
"""The type of the function with which a test starts engines and their client."""


class EngineEnds:
    """Passes on to the client what becomes of its engines, and remembers it."""

    def __init__(self, client: EngineClient) -> None:
        self.engine_stalled = client.engine_stalled
        self.exits: list[tuple[int, int]] = []
        """The number and the exit code of each process that has ended."""
        self.given_up: list[tuple[int, bool]] = []
        self._client = client

    @property
    def codes(self) -> list[int]:
        return [code for _, code in self.exits]

    def engine_exited(self, number: int, code: int) -> None:
        self.exits.append((number, code))
        self._client.engine_exited(number, code)

    def engine_given_up(self, number: int, reason: str, *, explained: bool) -> None:
        self.given_up.append((number, explained))
        self._client.engine_given_up(number, reason, explained=explained)


Keep = Callable[..., Awaitable[tuple[EngineProcesses, EngineClient, EngineEnds]]]
"""The type of the function with which a test starts engines that are started again when they end."""


async def soon(awaitable: Awaitable[object], seconds: float = 60) -> None:
    await asyncio.wait_for(awaitable, seconds)  # pyright: ignore[reportArgumentType]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def collect(stream: Stream, seconds: float = 60) -> list[Tokens | Failed]:
    async with asyncio.timeout(seconds):
        return [output async for output in stream]


def text(outputs: list[Tokens | Failed]) -> list[int]:
    return [token for output in outputs if isinstance(output, Tokens) for token in output.tokens]


async def first(stream: Stream) -> list[int]:
    """Wait until the request has its first token, and return what there is: later ones may have come, too."""
    async with asyncio.timeout(60):
        output = await anext(stream)
    assert isinstance(output, Tokens)
    return output.tokens
