"""Several models: who may use which, by whatever names."""

# pyright: reportPrivateUsage=false
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from media_files import QWEN_CONFIG, QWEN_SETTINGS

from models.plain_files import ConfigError
from server.access.client_identity import Caller
from server.access.key_file import Key
from server.errors import BadRequest, NotFound
from server.frontend.many_models import ManyModels
from server.frontend.model_memory import HostMemory
from server.options.model_list import ModelEntry
from server.options.parse_server_options import parse
from server.routes.adapters.loading import load_into, unload_from


def caller(*models: str) -> Caller:
    return Caller(owner="alice", key=Key(name="alice", sha256="0" * 64, models=list(models)))


async def test_adapters_are_found_by_their_names_and_behind_those_of_their_models() -> None:
    flags = (["--enable-lora"], ["--lora-modules", "sql=/a"], [])
    entries = [
        ModelEntry(id=id, name=name, aliases=(f"{name}:2",), config=parse([f"org/{name}", *given], {}))
        for id, (name, given) in enumerate(zip(("first", "second", "third"), flags, strict=True))
    ]
    models = ManyModels(entries[0].config, entries, HostMemory(1 << 30), lambda *order: None)
    first, second, _ = models.states
    for name in ("sql", "sql:latest", "second:sql", "second:2:sql"):
        assert models.find_named(name) == (second, name.removesuffix(":latest").rpartition(":")[2])
    assert models.find_named("first:2") == (first, "")
    assert models.find_named("first:late") == (first, "late")
    assert models.find_named("sql", caller("second")) == (second, "sql")
    for name, key in (("third:late", None), ("late", None), ("sql", caller("first"))):
        with pytest.raises(NotFound):
            models.find_named(name, key)
    with pytest.raises(BadRequest, match="or of an adapter"):
        models.move("sql", first)
    models.close()


class LoadedAdapters:
    """The adapters of a model that is loaded."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        if name in self.paths and not in_place:
            raise BadRequest("has already been loaded")
        self.paths[name] = path

    async def unload(self, name: str) -> None:
        if self.paths.pop(name, None) is None:
            raise NotFound("cannot be found")

    def find(self, name: str) -> str | None:
        return self.paths.get(name)


async def test_orders_on_adapters_mean_the_model_that_they_name() -> None:
    taking = ["--enable-lora", "--allow-runtime-lora", "--lora-dir", "/a"]
    flags = (taking, [*taking, "--lora-modules", "sql=/a"], ["--enable-lora"])
    entries = [
        ModelEntry(id=id, name=name, config=parse([f"org/{name}", *given], {}))
        for id, (name, given) in enumerate(zip(("first", "second", "third"), flags, strict=True))
    ]
    models = ManyModels(entries[0].config, entries, HostMemory(1 << 30), lambda *order: None)
    models._started = True
    first, second, _ = models.states
    for state in (first, second):
        state.slot.served, state.slot.state = (
            cast("Any", SimpleNamespace(adapters=LoadedAdapters())),
            "loaded",
        )

    async def load(name: str, model: str = "", key: Caller | None = None) -> None:
        await load_into(models, name, f"/{name}", model=model, in_place=False, caller=key)

    await load("late", "first")
    await load("second:own")
    await load("only", key=caller("second"))
    assert (first.adapters, second.adapters) == (["late"], ["sql", "own", "only"])
    assert models.find_named("late") == (first, "late") and models.find_named("own") == (second, "own")
    wrong = {
        ("new", ""): "first or second",
        ("second:new", "first"): "first or second",
        ("new", "third"): "`third` takes no orders",
        ("late", "second"): "an adapter of `first`",
        ("third", "first"): "name of a model",
        ("late", ""): "already been loaded",
        ("sql", ""): "in the table of `second`",
    }
    for (name, model), why in wrong.items():
        with pytest.raises(BadRequest, match=why):
            await load(name, model)
    await unload_from(models, "late", model="", caller=None)
    with pytest.raises(NotFound):
        await unload_from(models, "first:late", model="", caller=None)
    assert first.adapters == []
    models.close()


async def test_a_key_sees_and_uses_its_models_alone() -> None:
    entries = [
        ModelEntry(id=id, name=name, aliases=(f"{name}-alias",), config=parse([f"org/{name}"], {}))
        for id, name in enumerate(("first", "second", "third"))
    ]
    models = ManyModels(entries[0].config, entries, HostMemory(1 << 30), lambda *order: None)
    first, second, third = models.states
    own = caller("second-alias", "third", "gone")
    assert [name for name, _ in models.named(own)] == ["second", "second-alias", "third", "third-alias"]
    assert models.find(None, own) is models.find("tgi", own) is models.find("second:latest", own) is second
    assert models.find("org/third", own) is third and models.find(None) is first
    for name in ("first", "org/first", "nobody"):
        with pytest.raises(NotFound, match="This server has: second, second-alias, third, third-alias"):
            models.find(name, own)
    with pytest.raises(NotFound, match="none that your key is for"):
        models.find(None, caller())
    models.move("second-alias", third)  # the key is for what the alias means
    with pytest.raises(NotFound):
        models.find("second", own)
    models.close()


async def test_memory_in_which_no_model_has_room_is_refused_with_what_would_do() -> None:
    class Host(HostMemory):
        def measure(self, models: Any) -> tuple[int, list[int]]:
            return 100 << 20, [0] * len(models)

    def opened(size: int, *names: str) -> ManyModels:
        entries = [ModelEntry(id=id, name=name, config=parse([name], {})) for id, name in enumerate(names)]
        return ManyModels(entries[0].config, entries, Host(size), lambda *order: None)

    models = opened(160 << 20, "demo")
    with pytest.raises(ConfigError, match=r"--memory is 160 MiB, .* demo, the smallest") as refused:
        await models.start()
    models.close()
    enough = int(str(refused.value).rpartition("--memory ")[2].partition("M")[0])
    for models in (opened(enough << 20, "demo"), opened(160 << 20, "demo", "org/elsewhere")):
        await models.start()  # another one may be smaller
        models.close()


@pytest.mark.parametrize("limits", [{"image": 2}, {"image": 0, "video": 0}])
async def test_what_a_model_takes_of_pictures_is_known_before_it_is_loaded(
    limits: dict[str, int], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    described = {"architectures": ["Qwen2VLForConditionalGeneration"], "intermediate_size": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(described | QWEN_CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN_SETTINGS))
    config = parse([str(tmp_path), "--limit-mm-per-prompt", json.dumps(limits), "--max-media-mb", "3"], {})
    models = ManyModels(
        config, [ModelEntry(id=0, name="a", config=config)], HostMemory(1 << 30), lambda *order: None
    )
    [state] = models.states
    models._engines.peek(state)
    assert state.media == (({"image": 2, "video": 16}, 3 << 20) if limits["image"] else None)
    models.close()
