"""The API routes over a scripted frontend, spoken to as a client would."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
def app(frontend: FakeFrontend) -> ASGIApp:
    return make_app(frontend)


@pytest.fixture
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(app) as client:
        yield client
