"""What ends an API process, apart from what it serves."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.commands import bind
from server.options.server_options import parse
from server.run.api_processes import NOTHING_LEFT
from server.run.api_server import ApiServer
from worker.child import BROKE


@pytest.mark.parametrize(("broke", "code"), [(True, BROKE), (False, NOTHING_LEFT)])
async def test_an_error_in_its_client_ends_it_so_that_it_is_started_again(broke: bool, code: int) -> None:
    died = asyncio.Event()
    died.set()
    server = SimpleNamespace(
        _stop=asyncio.Event(),
        client=SimpleNamespace(died=died, broke=broke),
        _process=SimpleNamespace(first=False),
        _config=SimpleNamespace(exit_on_failure=True),
        _explain_death=lambda served: None,
    )
    forever = asyncio.ensure_future(asyncio.Event().wait())
    assert await ApiServer._serve(cast("Any", server), cast("Any", forever), cast("Any", forever)) == code
    forever.cancel()


@pytest.mark.parametrize(
    ("running", "named"), [(1, "1 running request"), (2, "2 running requests"), (0, None)]
)
async def test_draining_says_how_long_it_waits_and_how_to_end_at_once(
    caplog: pytest.LogCaptureFixture, running: int, named: str | None
) -> None:
    forced = asyncio.Event()
    forced.set()
    server = SimpleNamespace(
        _frontend=SimpleNamespace(begin_drain=lambda refuse: None, live=running, idle=asyncio.Event()),
        _http=SimpleNamespace(stop_listening=lambda: None),
        _force=forced,
        _config=SimpleNamespace(shutdown_timeout=25.0),
    )
    with caplog.at_level(logging.INFO):
        await ApiServer._drain(cast("Any", server))
    told = f"stopping: {named} may finish for up to 25 s; a second Ctrl-C or SIGTERM cuts them off"
    assert caplog.messages == ([told, f"stopping: {named} cut off"] if named else [])


def test_the_start_tells_the_port_that_was_taken() -> None:
    config = parse(["--port", "0"], {})
    with bind(config) as listener:
        server = SimpleNamespace(_config=config, _listener=listener)
        port = listener.getsockname()[1]
        assert port and ApiServer._where(cast("Any", server)) == f"http://127.0.0.1:{port} (docs: /docs)"
