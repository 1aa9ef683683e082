"""The adapters of a server: what their names mean to requests, and how they come and go."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine_core.adapters.messages import AdapterState
from engine_core.client.client import EngineClient
from models.checkpoint.hub import HubError, download_adapter
from models.config import ConfigError
from models.lora.task_folder import has_tasks, task_adapters
from server.errors import BadRequest, NotFound
from server.frontend.adapter_files import check_modules, facts_with, is_current, read_named
from server.frontend.adapter_resolver import AdapterResolver, folder_below, may_be_downloaded
from server.frontend.frontend import Frontend
from server.model_facts import TAG
from server.options.adapter_options import check_served_name

_RETRY_SECONDS = 0.2
"""Seconds after which an order is given again that no engine could take, because it is started again."""

_log = logging.getLogger(__name__)


class InvalidUserInput(BadRequest):
    """An order that vLLM refuses under this name."""

    type = "InvalidUserInput"


class _AdaptedClient:
    """The client of a model's engines, whose requests an adapter computes."""

    def __init__(self, client: EngineClient, digest: str) -> None:
        self._client, self._digest = client, digest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def submit(self, *given: Any, **options: Any) -> Any:
        return self._client.submit(*given, **options, adapter=self._digest)

    def submit_all(self, *given: Any, **options: Any) -> Any:
        return self._client.submit_all(*given, **options, adapter=self._digest)

    def submit_many(self, *given: Any, **options: Any) -> Any:
        return self._client.submit_many(*given, **options, adapter=self._digest)


class ServedAdapters:
    """Finds, loads and unloads the adapters of one model's server."""

    def __init__(self, frontend: Frontend, tasks: Mapping[str, Path] | None = None) -> None:
        """`tasks`: the folders of adapters that lie in the checkpoint, by the tasks for which they are."""
        self.frontend = frontend
        self._engines, self._options = frontend.client.adapters, frontend.config.adapters
        self._tasks = tasks or {}
        self.has_started = not self._options.modules and not self._tasks
        """Whether requests are taken: not before the adapters are there that they may name."""
        self._lock = asyncio.Lock()
        """Held while adapters change, so that a name means one thing for all engines."""
        self._resolver = AdapterResolver(frontend.config, self._load) if self._options.lora_resolver else None
        self._using = asyncio.Lock()
        """Held while an adapter is looked for that may have to be loaded, so that it is loaded once."""

    async def start(self, *, again: bool = False) -> None:
        """Load the adapters of the checkpoint and of --lora-modules, or, if the server had started before and
        engines have some adapters, take these as they are. Raises ConfigError if one cannot be loaded."""
        is_done = again and bool(self._engines.states)
        for task, folder in () if is_done else self._tasks.items():
            if error := await self._load(task, str(folder), folder, prompt=task):
                raise ConfigError(f"the adapter for the task {task} cannot be loaded: {error}")
        for module in () if is_done else self._options.modules:
            if error := await self._load(module.name, module.path, labels=tuple(module.labels)):
                raise ConfigError(f"--lora-modules: {module.name}: {error}")
        self.has_started = True

    async def check(self) -> None:
        """Raises ConfigError if one of --lora-modules is no adapter that can be served."""
        await asyncio.to_thread(check_modules, self.frontend.config)

    @property
    def may_be_named(self) -> bool:
        """Whether a request may name an adapter."""
        return bool(self._engines.states) or self._resolver is not None

    @property
    def states(self) -> Sequence[AdapterState]:
        return list(self._engines.states.values())

    def find(self, name: str) -> AdapterState | None:
        """The adapter of a name, which may stand behind the model's and a colon."""
        known = self._engines.states
        return known.get(name) or known.get(name.removesuffix(TAG)) or known.get(self._own_part(name))

    def _own_part(self, name: str) -> str:
        """What stands behind the model's name and a colon, or the name as it is."""
        base, colon, own = name.partition(":")
        return own if colon and base in self.frontend.facts.model_names else name

    def chosen(self, name: str) -> Frontend | None:
        """The frontend for a request that names this model or an adapter; None if one has to be looked for.

        Raises NotFound if nothing can have that name.
        """
        base = self.frontend
        if (state := self.find(name)) is not None:
            return self.adapted(state)
        if base.facts.is_name(name) or base.config.is_own_path(name):
            return base
        if self._resolver is None:
            raise self.unknown(name)
        return None

    def of_task(self, named: str | None, task: object) -> Frontend | None:
        """The frontend for a request for vectors whose `task` has an adapter in the checkpoint, if it names
        the model; else None. Raises BadRequest for other tasks."""
        base, state = self.frontend, None if named is None else self.find(named)
        if task is None or not self._tasks:
            return None
        if state is None and named is not None and not base.facts.is_name(named):
            return None
        own = "" if state is None else state.adapter.name
        if own and own not in self._tasks:
            return None
        known = [each for each in self._tasks if each in self._engines.states]
        if task not in known or own not in ("", task):
            raise BadRequest(
                f"`task` is {str(task)[:64]!r}, and this model has {', '.join(known)}: name one of them, or "
                "none for vectors of the base, and the model by its own name.",
                "task",
            )
        return self.adapted(self._engines.states[str(task)], base.facts.model_names)

    async def frontend_of(self, name: str) -> Frontend:
        """The frontend for a request that names an adapter. Raises ApiError if there is none."""
        return self.chosen(name) or await self.look_for(name)

    async def look_for(self, name: str) -> Frontend:
        """The frontend for a request whose adapter nobody has loaded. Raises ApiError if it cannot be."""
        assert self._resolver is not None
        await self._resolver.load(self._own_part(name).removesuffix(TAG), self.unknown(name))
        if (state := self.find(name)) is None:
            raise self.unknown(name)  # it was unloaded at once
        return self.adapted(state)

    def adapted(self, state: AdapterState, names: tuple[str, ...] = ()) -> Frontend:
        """The frontend for one request that an adapter answers, under its name or the first of `names`."""
        own, facts = copy.copy(self.frontend), facts_with(self.frontend.facts, state)
        facts = replace(facts, model_names=names or facts.model_names)
        tokenizer = self.frontend.tokenizer.written_by(facts.chat_template)
        changes = {
            "facts": facts,
            "tokenizer": tokenizer,
            "reading_context": dataclasses.replace(
                self.frontend.reading_context, facts=facts, tokenizer=tokenizer
            ),
            "metrics": self.frontend.metrics.of_adapter(state.adapter.name),
            "client": _AdaptedClient(self.frontend.client, state.adapter.digest),
            "is_one_of_several": True,  # the request is here because of the name
        }
        vars(own).update(changes)
        return own

    def unknown(self, name: str) -> NotFound:
        """The error for a name that nothing has, with those that are near."""
        known = [*self.frontend.facts.model_names, *self._engines.states]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        meant = (
            f" Did you mean {' or '.join(near)}?" if near else f" This server has: {', '.join(known[:20])}"
        )
        return NotFound(f"The model `{name[:200]}` does not exist.{meant}", "model")

    async def use(self, name: str, path: str) -> AdapterState:
        """The adapter of a folder, or of a name on the hub, which is loaded unless it is there. Raises
        BadRequest if it cannot be."""
        async with self._using:
            known = self._engines.states.get(name)
            try:
                if known is not None and is_current(known.adapter, path):
                    return known
            except OSError as error:
                raise BadRequest(str(error), "lora_request") from error
            if error := await self._load(name, path):
                raise BadRequest(f"LoRA adapter '{name}' could not be loaded. {error}", "lora_request")
            return self._engines.states[name]

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter from --lora-dir or --lora-repos into all engines. Raises ApiError if one cannot."""
        name = self._own_part(name)
        try:
            check_served_name(name)
        except ValueError as error:
            raise BadRequest(f"{error}.", "lora_name") from None
        if name in self.frontend.facts.model_names:
            raise BadRequest(f"`{name[:200]}` is a name of the model itself.", "lora_name")
        if name in self._engines.states and not in_place:
            raise InvalidUserInput(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True."
            )
        folder = await asyncio.to_thread(self._allowed, path)
        if error := await self._load(name, path, folder):
            raise BadRequest(f"LoRA adapter '{name}' was found but could not be loaded. {error}", "lora_path")

    async def unload(self, name: str) -> None:
        name = name if name in self._engines.states else self._own_part(name)
        if name not in self._engines.states:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", "lora_name")
        async with self._lock:
            while not (any(one.works for one in self.frontend.client.replicas) or self.frontend.client.dead):
                await asyncio.sleep(_RETRY_SECONDS)  # or other API processes would tell the next engine of it
            await self._engines.drop(name)

    def _allowed(self, path: str) -> Path:
        """The real path of a folder that clients may have loaded. Raises ApiError for others."""
        options = self._options
        if not (options.lora_dir or options.lora_repos):
            raise BadRequest(
                "Nothing is open for adapters: start the server with --lora-dir or --lora-repos.", "lora_path"
            )
        if (found := folder_below(options.lora_dir, path)) is not None:
            return found
        if not may_be_downloaded(options.lora_repos, path):
            raise NotFound(
                "There is no such folder below those of --lora-dir, nor is it in --lora-repos.", "lora_path"
            )
        try:
            return download_adapter(path, self.frontend.config.engine.download_dir)
        except HubError as error:
            raise BadRequest(str(error), "lora_path") from error

    async def _load(self, name: str, source: str, folder: Path | None = None, **options: Any) -> str:
        """Have all engines load an adapter; returns why one cannot, or an empty text. Clients read of its
        `folder`, if they have named it, by the name that they know, `source`."""
        try:
            frontend = self.frontend
            given = name, source, frontend.config, frontend.tokenizer, folder
            adapter = await asyncio.to_thread(read_named, *given)
        except (ValueError, OSError) as error:
            return str(error) if folder is None else str(error).replace(str(folder), source)
        async with self._lock:
            while (error := await self._engines.load(replace(adapter, **options))) is None:
                if self.frontend.client.dead:
                    return "no engine works any more"
                await asyncio.sleep(_RETRY_SECONDS)
        return error if folder is None else error.replace(str(folder), source)


def open_adapters(frontend: Frontend) -> ServedAdapters | None:
    """The adapters of a model whose folder is known; None if requests may name none.

    Raises ConfigError if the checkpoint has some, and its weights are not on this machine.
    """
    engine, tasks = frontend.config.engine, task_adapters(frontend.folder)
    if not tasks and engine.worker.load_format != "dummy" and has_tasks(frontend.folder):
        raise ConfigError(
            f"{engine.model}: adapters for its tasks lie in its weights, which are not on this machine: "
            "serve it from one that has an engine"
        )
    return ServedAdapters(frontend, tasks) if tasks or engine.worker.lora.enable_lora else None
