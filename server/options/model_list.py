"""The models of a server that has several: read from a TOML file, a folder, or the command line.

Each is configured like a server of its own, by the options of the command line with its own over them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec

from server.options.adapter_options import read_module
from server.options.option_parsing import Option, OptionError, VllmFlag
from server.options.option_sources import read_fields
from server.options.server_flags import ServerConfig
from worker.host.machine import hides_cards
from worker.host.nvidia import cards_here, cuda_of_torch, why_unusable
from worker.option_groups import ADAPTERS, ANSWERS, MEDIA, MEMORY, MODEL, SCHEDULER, TEXT, WORKERS

_GROUPS = (MODEL, ADAPTERS, MEMORY, WORKERS, SCHEDULER, TEXT, MEDIA, ANSWERS)
"""Groups of options that a model may have for itself. Others are those of the whole server."""
_OF_SERVER = ("models", "memory", "served_model_name", "enable_sleep_mode", "device")


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One of the models of a server."""

    id: int = 0
    """A number that no other model, and no other configuration of this one, has had in this run."""
    name: str
    """The name by which answers call it."""
    aliases: tuple[str, ...] = ()
    """Other names, which may come to mean another model while the server runs."""
    config: ServerConfig

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that are loaded with it."""
        return [module.name for module in self.config.adapters.modules]

    @property
    def takes_adapters(self) -> bool:
        return self.config.engine.worker.lora.enable_lora

    @property
    def takes_orders(self) -> bool:
        """Whether adapters may be loaded and unloaded while it runs."""
        return self.takes_adapters and self.config.adapters.allow_runtime_lora


class GivenModel(msgspec.Struct, frozen=True):
    """The options that were given for one model."""

    values: Mapping[str, object]
    """Its options, by their fields; one is its model."""
    name: str | None = None
    aliases: tuple[str, ...] = ()


def read_models(
    path: Path, options: Sequence[Option], vllm_flags: Sequence[VllmFlag], without_effect: list[VllmFlag]
) -> list[GivenModel]:
    """The models of a file, or of a folder. Raises OptionError with what is wrong, and where."""
    if path.is_dir():
        found = [
            GivenModel({"model": str(each)}, name=each.name.removesuffix(".gguf"))
            for each in sorted(path.iterdir())
            if (each / "config.json").is_file() or each.suffix == ".gguf" or any(each.glob("*.gguf"))
        ]
        if not found:
            raise OptionError(f"--models {path}: no folder or GGUF file in it is a model")
        return found
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise OptionError(f"--models {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"--models {path} is not TOML: {error}") from error
    tables = content.pop("models", None)
    if content or not isinstance(tables, list) or not tables:
        raise OptionError(
            f"--models {path}: it must have a table [[models]] for each model, and nothing else"
        )
    allowed = [each for each in options if each.doc.group in _GROUPS and each.field not in _OF_SERVER]
    others = {each.field for each in options} - {each.field for each in allowed}
    found = list[GivenModel]()
    for number, table in enumerate(tables, 1):
        where = f"--models {path}, model {number}"
        if not isinstance(table, dict) or not isinstance(table.get("model"), str):
            raise OptionError(f"{where}: it needs `model`, a folder, hub id or GGUF file")
        own = _take(dict(table), where)
        for key in table:
            if str(key).replace("-", "_") in others:
                raise OptionError(f"{where}: {key} is of the whole server: give it on the command line")
        values = read_fields(allowed, vllm_flags, own.values, where, without_effect)
        beside = path.parent / str(values["model"])
        if beside.exists():
            values["model"] = str(beside)
        _find_adapters_beside(values, path.parent, where)
        found.append(msgspec.structs.replace(own, values=values))
    return found


def _find_adapters_beside(values: dict[str, object], folder: Path, where: str) -> None:
    """Have paths of adapters mean those beside the file, where there are some."""
    try:
        modules = [read_module(each) for each in cast("list[object]", values.get("lora_modules", []))]
    except ValueError as error:
        raise OptionError(f"{where}: {error}") from error
    if modules:
        found = (msgspec.structs.replace(each, path=_beside(folder, each.path)) for each in modules)
        values["lora_modules"] = [msgspec.to_builtins(each) for each in found]
    if folders := cast("list[str]", values.get("lora_dir", [])):
        values["lora_dir"] = [_beside(folder, each) for each in folders]


def _beside(folder: Path, path: str) -> str:
    return str(folder / path) if (folder / path).is_dir() else path


def _take(table: dict[str, Any], where: str) -> GivenModel:
    """Take what is no option of `serve` out of a table."""
    name, aliases = table.pop("name", None), table.pop("aliases", [])
    if name is not None and not _is_name(name):
        raise OptionError(f"{where}: name must be a text of 1 to 200 characters")
    if not isinstance(aliases, list) or not all(map(_is_name, aliases)):
        raise OptionError(f"{where}: aliases must be a list of names")
    return GivenModel(table, name, tuple(aliases))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable()


def numbered(entries: Sequence[ModelEntry], known: Sequence[ModelEntry]) -> list[ModelEntry]:
    """These models with the ids of those `known` that are the same, and new ids for others."""
    ids = count(1 + max((entry.id for entry in known), default=-1))
    kept = [next((one.id for one in known if _is_same(one, entry)), None) for entry in entries]
    return [
        msgspec.structs.replace(entry, id=next(ids) if id is None else id)
        for entry, id in zip(entries, kept, strict=True)
    ]


def _is_same(one: ModelEntry, other: ModelEntry) -> bool:
    return (one.name, one.config) == (other.name, other.config)


def check_models(entries: Sequence[ModelEntry]) -> None:
    """Raises OptionError if the models cannot be served together."""
    known: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases, *entry.adapters):
            if (other := known.setdefault(name, entry)) is not entry:
                raise OptionError(
                    f"{other.config.engine.model} and {entry.config.engine.model} would both be called "
                    f"{name}: give them names in a file of --models"
                )
        _check_model(entry)


def _check_model(entry: ModelEntry) -> None:
    config, engine = entry.config, entry.config.engine
    if engine.model.startswith(("/", "./", "../", "~")) and not Path(engine.model).expanduser().exists():
        raise OptionError(f"there is no {engine.model}")  # else it would be missed when it is asked for
    alone = {
        "--headless": config.headless,
        "--data-parallel-size-local": config.replicas.elsewhere,
        "--data-parallel-external-lb": config.replicas.apart,
        "--distributed-executor-backend ray": engine.distributed_executor_backend == "ray",
        "--nnodes": engine.nnodes > 1,
        "--api-server-count": config.api_server_count > 1,
        "--enable-sleep-mode": engine.enable_sleep_mode,
        "--server-dev-mode": config.server_dev_mode,
        "--stat-loggers": bool(config.plugins.stat_loggers),
        "--profiler-config": bool(engine.worker.profiler_config),
    }
    if flag := next((flag for flag, given in alone.items() if given), None):
        raise OptionError(f"{flag} is for a server of one model: leave it out, or serve {entry.name} alone")


def uses_cards(config: ServerConfig) -> bool:
    """Whether workers will choose CUDA, as far as is known without torch."""
    asked = config.engine.worker.device
    if asked != "auto" or hides_cards():
        return asked == "cuda"
    cuda = cuda_of_torch()
    return cuda is not None and bool(cards_here()) and why_unusable(cuda) is None
