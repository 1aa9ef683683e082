"""Fixtures: an address for engines, and a client of two of them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from scripted_engine import Connect, Replicated, Two

from engine_core.client.client import EngineClient
from engine_core.config import Address, Replicas


@pytest_asyncio.fixture
async def connect(address: Address) -> AsyncIterator[Connect]:
    """A function that makes a client of so many replicas."""
    made: list[Replicated] = []

    def begin(size: int = 1, here: int | None = None, together: bool = False, **options: Any) -> Replicated:
        layout = Replicas(size=size, here=size if here is None else here, together=together)
        made.append(Replicated(address, options.pop("layout", layout), **options))
        return made[-1]

    yield begin
    for one in made:
        one.close()


@pytest_asyncio.fixture
async def two(connect: Connect) -> Two:
    both = connect(2)
    return both.client, await both.start(0), await both.start(1), both


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests say no time of sending, so that they can be compared."""
    monkeypatch.setattr(EngineClient, "_now", lambda _: 0.0)
