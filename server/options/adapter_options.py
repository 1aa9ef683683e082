"""Options of adapters (LoRA): which there are at the start, and which may come while the server runs."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from worker.option_groups import ADAPTERS
from worker.options import OptionDoc

MOST_NAME = 200
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


def is_adapter_name(name: str) -> bool:
    """Whether an adapter that is looked for may have this name, which leads to nowhere else."""
    return len(name) <= MOST_NAME and _NAME.fullmatch(name) is not None


def check_served_name(name: str) -> None:
    """Raises ValueError unless an adapter may have this name, which metrics join to others by commas."""
    if not 0 < len(name) <= MOST_NAME or not name.isprintable() or "," in name:
        raise ValueError(
            f"the name of an adapter has 1 to {MOST_NAME} printable characters and no comma, and "
            f"{name[:MOST_NAME]!r} is none"
        )


class AdapterModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that --lora-modules names."""

    name: str
    path: str
    """A folder of this machine, or a name on the hub."""
    base_model_name: str | None = None
    """The name of the served model, which may stand there for checking."""
    labels: list[str] = []
    """The names of what its head tells apart."""


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The adapters that a server has, and may get."""

    lora_modules: Annotated[list[object], OptionDoc(ADAPTERS, repeats=True)] = []
    """Adapters to load at the start, as name=path or {"name", "path", "labels"}; the path is a folder, or
    owner/name or owner/name/folder on the hub. Implies --enable-lora."""
    allow_runtime_lora: Annotated[bool, OptionDoc(ADAPTERS)] = False
    """Take POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for adapters of --lora-dir and
    --lora-repos. Whoever may use the server may call them, unless there are keys with rights."""
    lora_resolver: Annotated[bool, OptionDoc(ADAPTERS)] = False
    """Look for a model that requests name and nobody has loaded in the folders of --lora-dir, then in
    --lora-repos, and load it. Implies --enable-lora."""
    lora_dir: Annotated[list[str], OptionDoc(ADAPTERS, repeats=True)] = []
    """Folders in which adapters may be loaded while the server runs."""
    lora_repos: Annotated[list[str], OptionDoc(ADAPTERS, repeats=True)] = []
    """Repositories of the hub, owner/name, or folders in them, owner/name/folder, whose adapters may be
    loaded while the server runs."""

    @property
    def need_adapters(self) -> bool:
        """Whether what is asked for needs --enable-lora."""
        return bool(self.lora_modules) or self.lora_resolver

    @property
    def modules(self) -> list[AdapterModule]:
        """The adapters to load at the start. Raises ValueError if what names them is wrong."""
        return [read_module(given) for given in self.lora_modules]

    def check(self, model_names: tuple[str, ...]) -> None:
        """Raises ValueError if an adapter cannot have its name, or may be looked for nowhere."""
        if self.lora_resolver and not (self.lora_dir or self.lora_repos):
            raise ValueError("--lora-resolver needs places to look in: give --lora-dir or --lora-repos, too")
        if self.lora_repos and not (self.lora_resolver or self.allow_runtime_lora):
            raise ValueError(
                "--lora-repos is for adapters that come later: give --lora-resolver or --allow-runtime-lora"
            )
        for repository in self.lora_repos:
            if repository.count("/") < 1 or not is_adapter_name(repository):
                raise ValueError(f"--lora-repos: {repository!r} should be owner/name or owner/name/folder")
        taken = set(model_names)
        for module in self.modules:
            try:
                check_served_name(module.name)
            except ValueError as error:
                raise ValueError(f"--lora-modules: {error}") from None
            if module.name in taken:
                raise ValueError(
                    f"--lora-modules: the name {module.name!r} is taken, by the model or another adapter"
                )
            taken.add(module.name)
            if module.base_model_name not in (None, *model_names):
                raise ValueError(
                    f"--lora-modules: {module.name} is said to be for {module.base_model_name!r}, and this "
                    f"server has {' and '.join(model_names)}"
                )


def read_module(given: object) -> AdapterModule:
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        name, equals, path = given.partition("=")
        if not equals or not name.strip() or not path.strip():
            raise ValueError(f"--lora-modules: {given!r} should be name=path")
        return AdapterModule(name.strip(), path.strip())
    try:
        fields = msgspec.json.decode(given) if isinstance(given, str) else given
        module = msgspec.convert(fields, AdapterModule)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        known = ", ".join(AdapterModule.__struct_fields__)
        raise ValueError(f"--lora-modules: {given!r}: {error}; its fields are {known}") from error
    if not module.name.strip() or not module.path.strip():
        raise ValueError(f"--lora-modules: {given!r} needs a name and a path")
    return module
