"""Engines that a test has started in processes of their own: to wait for them and read their streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine_core.client.client import EngineClient
from engine_core.client.in_flight import Stream
from engine_core.engine_processes import EngineProcesses
from engine_core.protocol import Failed, Tokens

Start = Callable[..., Awaitable[tuple[EngineProcesses, EngineClient]]]
"""The type of the function with which a test starts engines and their client."""


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


async def first(stream: Stream) -> None:
    """Wait until the request has its first token."""
    async with asyncio.timeout(60):
        assert isinstance(await anext(stream), Tokens)
