"""A server of fake connections, at most three, and one client of it."""

import pytest
from fake_connection import EchoApp, FakeClient, FakeServer


@pytest.fixture
async def app() -> EchoApp:
    return EchoApp()


@pytest.fixture
async def server(app: EchoApp) -> FakeServer:
    return FakeServer(app, most=3)


@pytest.fixture
async def client(server: FakeServer) -> FakeClient:
    return server.connect()
