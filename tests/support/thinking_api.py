"""Fixtures for several dialects: the API over a frontend whose answers think and call tools."""

from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa<ris"}}\n</tool_call>'


@pytest.fixture
def frontend() -> FakeFrontend:
    frontend = FakeFrontend(reply=f"<think>\nThey ask.\n</think>\n\nI look.\n{CALL}\n{CALL}")
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=4096)
    return frontend


@pytest.fixture
def app(frontend: FakeFrontend) -> ASGIApp:
    return make_app(frontend, tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with make_client(app) as client:
        yield client
