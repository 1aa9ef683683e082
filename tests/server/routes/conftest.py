"""Fixtures: the API over a scripted frontend, and an HTTP client for it."""

from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend, vectors
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


@pytest.fixture
def embedder(frontend: FakeFrontend) -> None:
    """Serve a model that generates, and embeds a text as a vector that depends on its tokens."""
    frontend.serve("generate", "embed", "token_embed")
    frontend.answer_of = lambda item: vectors(
        np.sin(np.arange(1, (item.params.dimensions or 8) + 1) * sum(item.tokens))
    )
