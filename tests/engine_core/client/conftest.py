"""Fixtures: an address for engines, and a client of two of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from scripted_engine import Replicated, Two

from engine_core.client.client import EngineClient
from engine_core.config import Address, Replicas


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address(requests=f"ipc://{tmp_path}/requests", answers=f"ipc://{tmp_path}/answers")


@pytest_asyncio.fixture
async def two(address: Address) -> AsyncIterator[Two]:
    both = Replicated(address, Replicas(size=2, here=2))
    yield both.client, await both.start(0), await both.start(1), both
    both.close()


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests say no time of sending, so that they can be compared."""
    monkeypatch.setattr(EngineClient, "_now", lambda _: 0.0)
