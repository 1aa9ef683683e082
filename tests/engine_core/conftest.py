"""Fixtures: a checkpoint's folder, and engines in processes of their own with their client."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from sizes import engine_config
from started_engines import EngineEnds, Keep, Start, soon

from engine_core.client.client import EngineClient
from engine_core.config import Address, Replicas
from engine_core.engine_children import EngineProcesses, start_engines
from engine_core.protocol import Progress
from engine_core.restarts import keep_engines

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address(requests=f"ipc://{tmp_path}/requests", answers=f"ipc://{tmp_path}/answers")


@pytest.fixture
def support_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes import what this test can."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint's folder with all that this floor reads of it, which is config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 50,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest_asyncio.fixture
async def start(model: Path, support_path: None) -> AsyncIterator[Start]:
    """A function that starts engines of the fake worker, and a client of the first server."""
    started: list[tuple[EngineProcesses, EngineClient]] = []

    async def begin(
        *,
        ready: bool = True,
        replicas: int = 1,
        together: bool = False,
        api_servers: int = 1,
        drain_seconds: float = 0.0,
        module: str = "fake_worker",
        restart_wait: float | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        **changes: object,
    ) -> tuple[EngineProcesses, EngineClient]:
        config = engine_config(model, **changes)
        layout = Replicas(size=replicas, here=replicas, together=together)
        engines = start_engines(
            config, layout, module=module, api_servers=api_servers, drain_seconds=drain_seconds
        )
        client = EngineClient(
            engines.addresses[0],
            layout,
            servers=api_servers,
            restart_wait=restart_wait,
            on_progress=on_progress,
        )
        started.append((engines, client))
        if ready:
            await soon(client.ready_or_dead.wait())
            assert client.dead is None
        return engines, client

    yield begin
    for engines, client in started:
        client.close()
        engines.stop(2)


@pytest_asyncio.fixture
async def keep(start: Start, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keep]:
    """A function that starts engines, each of which is started again at once when it ends."""
    monkeypatch.setattr("engine_core.restarts.PAUSES", (0.0,) * 5)
    keeping: list[asyncio.Task[None]] = []

    async def begin(
        *, worked: bool = True, restart_wait: float = 30.0, **options: object
    ) -> tuple[EngineProcesses, EngineClient, EngineEnds]:
        engines, client = await start(restart_wait=restart_wait, **options)
        engines.worked = worked
        ends = EngineEnds(client)
        keeping.append(asyncio.create_task(keep_engines(engines, ends)))
        return engines, client, ends

    yield begin
    for task in keeping:
        task.cancel()
