"""Adapters of a server: those that it starts with, and those that are looked for by their names: once, and
only where the operator says."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from adapter_files import write_adapter
from fake_client import FakeClient
from fake_frontend import FakeFrontend

from engine_core.adapters.messages import Adapter, AdapterState
from models.config import ConfigError
from server.errors import READY, ApiError, BadRequest, NotFound, Unavailable, loading
from server.frontend import adapter_resolver
from server.frontend import adapters as adapters_module
from server.frontend.adapters import ServedAdapters
from server.frontend.frontend import Frontend
from server.metrics.server_metrics import Metrics
from server.options.parse_server_options import parse
from worker.calls.messages import AdapterFacts


class FakeEngines:
    """Engines that load what they are told to, after a moment."""

    def __init__(self) -> None:
        self.states: dict[str, AdapterState] = {}
        self.loaded: list[str] = []
        self.error = ""
        self.gate: asyncio.Event | None = None
        """An event that each load waits for."""
        self.away = 0
        """The orders that come before an engine is started again."""

    async def load(self, adapter: Adapter) -> str | None:
        self.loaded.append(adapter.name)
        if self.away:
            self.away -= 1
            return None
        await (asyncio.sleep(0.01) if self.gate is None else self.gate.wait())
        if self.error:
            return self.error
        self.states[adapter.name] = AdapterState(adapter, AdapterFacts(bytes=1))
        return ""


def served(*flags: str) -> tuple[ServedAdapters, FakeEngines]:
    engines, config = FakeEngines(), parse(["org/tiny", "--lora-resolver", *flags], {})
    frontend: Any = FakeFrontend()
    frontend.config, frontend.client = config, SimpleNamespace(adapters=engines, dead=None)
    return ServedAdapters(frontend), engines


async def error_of(adapters: ServedAdapters, name: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await adapters.look_for(name)
    return caught.value


async def test_requests_are_taken_when_the_adapters_are_there_that_they_may_name(
    client: FakeClient, folder: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "sql")
    asked: Any = client
    asked.adapters = engines = FakeEngines()
    engines.gate = asyncio.Event()
    config = parse([str(folder), "--lora-modules", f"sql={tmp_path / 'sql'}"], {})
    frontend = Frontend(config, asked, Metrics("m"))
    frontend.adapters = adapters = ServedAdapters(frontend)
    client.locate(folder)
    client.become_ready()
    await frontend.start()
    starting = asyncio.create_task(adapters.start())
    while not engines.loaded:
        await asyncio.sleep(0.01)
    assert frontend.status == loading("adapters", 0.0)  # which /health tells
    with pytest.raises(Unavailable, match="stage adapters"):
        frontend.require_ready()
    engines.gate.set()
    await starting
    assert frontend.status == READY and adapters.find("sql") is not None
    engines.error = "no layer for q_proj"
    with pytest.raises(ConfigError, match="--lora-modules: sql: no layer for q_proj"):
        await ServedAdapters(frontend).start()


async def test_an_adapter_is_loaded_once_however_many_ask_for_it(tmp_path: Path) -> None:
    write_adapter(tmp_path / "team" / "sql", fields={"base_model_name_or_path": "/models/Tiny"})
    adapters, engines = served("--lora-dir", str(tmp_path))
    assert adapters.chosen("team/sql") is None
    assert adapters.chosen("tiny") is adapters.frontend
    asking = [asyncio.create_task(adapters.look_for(f"{base}team/sql")) for base in ("", "tiny:") * 10]
    await asyncio.sleep(0)
    asking[0].cancel()  # whoever leaves ends the search for nobody else
    found: list[Any] = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(each.is_one_of_several for each in found[1:])
    assert engines.loaded == ["team/sql"]
    chosen = adapters.chosen("team/sql")
    assert chosen is not None and chosen is not adapters.frontend


async def test_a_name_that_is_not_found_is_remembered_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters, engines = served("--lora-dir", str(tmp_path))
    error = await error_of(adapters, "sql")
    assert isinstance(error, NotFound) and "does not exist" in error.message
    write_adapter(tmp_path / "sql", fields={"base_model_name_or_path": "org/tiny"})
    assert isinstance(await error_of(adapters, "sql"), NotFound)
    monkeypatch.setattr(adapter_resolver, "MISS_SECONDS", 0.0)
    assert isinstance(await error_of(adapters, "new"), NotFound)
    write_adapter(tmp_path / "new", fields={"base_model_name_or_path": "org/tiny"})
    await adapters.look_for("new")
    assert engines.loaded == ["new"]


async def test_names_lead_to_no_other_places_and_models(tmp_path: Path) -> None:
    inside, fields = tmp_path / "inside", {"base_model_name_or_path": "org/tiny"}
    write_adapter(tmp_path / "outside", fields=fields)
    write_adapter(inside / "other", fields={"base_model_name_or_path": "org/large"})
    write_adapter(inside / "wide", fields={**fields, "use_qalora": True})
    (inside / "link").symlink_to(tmp_path / "outside")
    adapters, engines = served("--lora-dir", str(inside), "--lora-repos", "owner/repo/one")
    for name in ("link", "../outside", str(tmp_path / "outside"), ".", "x" * 300, "a\0b", "owner/repo/two"):
        assert isinstance(await error_of(adapters, name), NotFound), name
    assert (
        "it is an adapter of large, and this server has org/tiny"
        in (await error_of(adapters, "other")).message
    )
    error = await error_of(adapters, "wide")
    assert isinstance(error, BadRequest)
    assert "'wide' was found but could not be loaded. " in error.message
    assert str(tmp_path) not in error.message
    assert not engines.loaded
    write_adapter(inside / "narrow", fields=fields)
    engines.error = f"{inside / 'narrow'}: q_proj is [8, 8] in the adapter"
    assert (await error_of(adapters, "narrow")).message.endswith(
        "loaded. narrow: q_proj is [8, 8] in the adapter"
    )


async def test_repositories_come_after_folders_and_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"base_model_name_or_path": "org/tiny"}
    write_adapter(tmp_path / "hub" / "sql", fields=fields, seed=1)
    write_adapter(tmp_path / "here" / "owner" / "repo" / "chat", fields=fields)
    asked: list[dict[str, Any]] = []

    def download(**call: Any) -> str:
        asked.append(call)
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path / "here")  # a folder there is not meant by the name of a repository
    adapters, engines = served("--lora-dir", str(tmp_path / "here"), "--lora-repos", "owner/repo")
    await adapters.look_for("owner/repo/chat")
    assert not asked
    await adapters.look_for("owner/repo/sql")
    assert engines.loaded == ["owner/repo/chat", "owner/repo/sql"]
    [call] = asked
    assert call["repo_id"] == "owner/repo"
    assert call["allow_patterns"] == ["sql/adapter_model.safetensors", "sql/*.json", "sql/*.jinja"]
    assert engines.states["owner/repo/sql"].adapter.folder == str(tmp_path / "hub" / "sql")


async def test_repositories_are_loaded_by_orders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path / "sql")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda **call: str(tmp_path))
    adapters, engines = served("--lora-repos", "owner/repo", "--allow-runtime-lora")
    await adapters.load("mine", "owner/repo/sql", in_place=False)
    assert engines.states["mine"].adapter.source == "owner/repo/sql"
    for path in ("owner/other/sql", "owner/repo/../sql", "sql"):
        with pytest.raises(NotFound, match="no such folder"):
            await adapters.load("no", path, in_place=False)
    state = await adapters.use("mine", "owner/repo/sql")
    assert state is engines.states["mine"]
    (tmp_path / "sql" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    assert await adapters.use("mine", "owner/repo/sql") is not state


async def test_an_order_waits_for_an_engine_that_is_started_again_unless_all_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "_RETRY_SECONDS", 0.0)
    write_adapter(tmp_path / "sql")
    adapters, engines = served("--lora-dir", str(tmp_path))
    engines.away = 3
    await adapters.load("sql", "sql", in_place=False)
    assert engines.loaded == ["sql"] * 4 and adapters.find("sql") is not None
    engines.away, adapters.frontend.client.dead = 1, "it broke"
    with pytest.raises(BadRequest, match="no engine works any more"):
        await adapters.load("sql", "sql", in_place=True)
