"""What ends an API process, apart from what it serves."""

# pyright: reportPrivateUsage=false

import asyncio
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from adapter_files import write_adapter

from server.frontend.adapters import ServedAdapters
from server.frontend.frontend import Frontend
from server.options.parse_server_options import parse
from server.run.api_children import NOTHING_LEFT
from server.run.api_lifecycle import ApiServer
from server.run.commands import bind
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


async def test_adapters_that_cannot_be_served_end_the_start_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    write_adapter(tmp_path / "wide", {"q.lora_A.weight": (64, 8)})
    for path, why in (("/nowhere/a", "'/nowhere/a' is not a folder here"), ("wide", "--max-lora-rank 64")):
        frontend: Any = object.__new__(Frontend)  # which cannot start
        frontend.config = parse(["org/tiny", "--lora-modules", f"sql={tmp_path / path}"], {})
        frontend.client = SimpleNamespace(adapters=None)
        frontend.adapters = ServedAdapters(frontend)
        failed: list[str] = []
        client, process = SimpleNamespace(fail=failed.append), SimpleNamespace(first=True)
        server = SimpleNamespace(_frontend=frontend, client=client, _process=process)
        assert not await ApiServer._follow_start(cast("Any", server))
        [told] = failed
        assert told.startswith("--lora-modules: sql: ") and why in told


def test_the_address_that_is_shown_is_the_servers_own() -> None:
    """The path of --root-path is the proxy's: asked with it, the server itself answers 404."""
    listener = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 8000))
    server = SimpleNamespace(_config=parse(["m", "--root-path", "/llm"], {}), _listener=listener)
    assert ApiServer._where(cast("Any", server)) == "http://127.0.0.1:8000 (docs: /docs)"


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
    told = f"stopping: {named} may finish for up to 25 s; a second Ctrl-C or SIGTERM ends them at once"
    assert caplog.messages == ([told, f"stopping: {named} ended before completion"] if named else [])


def test_the_start_tells_the_port_that_was_taken() -> None:
    config = parse(["--port", "0"], {})
    with bind(config) as listener:
        server = SimpleNamespace(_config=config, _listener=listener)
        port = listener.getsockname()[1]
        assert port and ApiServer._where(cast("Any", server)) == f"http://127.0.0.1:{port} (docs: /docs)"


@pytest.mark.parametrize("serves", [True, False])
async def test_engines_of_other_machines_that_do_not_come_are_named(
    serves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failed = list[str]()
    flags = ("-dp", "2", "-dpl", "0", "--cluster-key", "x" * 20, "--engine-ready-timeout-s", "1")
    replicas = [SimpleNamespace(number=0, ready="facts")] if serves else []
    server = SimpleNamespace(
        _config=parse(["org/tiny", *flags], {}),
        _process=SimpleNamespace(first=True, index=0),
        _heard=time.monotonic() - 0.9,
        client=SimpleNamespace(replicas=replicas, fail=failed.append),
    )
    await ApiServer._expect_engines(cast("Any", server))
    [told] = caplog.messages if serves else failed
    assert told.startswith(f"engine {'1' if serves else '0, 1'} of other machines: nothing was heard")
    assert not (serves and failed)
