from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from later import Later
from live import LiveServer, serving

anthropic = Later("anthropic")


@pytest.fixture(scope="session")
def demo() -> Iterator[LiveServer]:
    """The built-in model, served with the flags a newcomer would use."""
    with serving("demo", "--dtype", "float32", "--kv-cache-memory-bytes", "256M") as server:
        yield server


@pytest.fixture
def client(demo: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(demo: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.url, api_key="unused", max_retries=0) as client:
        yield client
