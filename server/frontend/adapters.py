"""The adapters of a server: what their names mean to requests, and how they come and go."""

from __future__ import annotations

import asyncio
import copy
import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine_core.adapters.messages import AdapterState
from engine_core.client.client import EngineClient
from models.config import ConfigError
from server.errors import BadRequest, NotFound
from server.frontend.frontend import Frontend
from server.model_facts import TAG
from server.requests.adapted_models import facts_with, is_current, read_named

_log = logging.getLogger(__name__)


class _AdaptedClient:
    """The client of a model's engines, whose requests an adapter computes."""

    def __init__(self, client: EngineClient, digest: str) -> None:
        self._client, self._digest = client, digest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def submit(self, *given: Any, **options: Any) -> Any:
        return self._client.submit(*given, **options, adapter=self._digest)

    def submit_choices(self, *given: Any, **options: Any) -> Any:
        return self._client.submit_choices(*given, **options, adapter=self._digest)

    def submit_many(self, *given: Any, **options: Any) -> Any:
        return self._client.submit_many(*given, **options, adapter=self._digest)


class ServedAdapters:
    """Finds, loads and unloads the adapters of one model's server."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self._engines, self._options = frontend.client.adapters, frontend.config.adapters
        self.has_started = not self._options.modules
        """Whether requests are taken: not before the adapters are there that they may name."""
        self._lock = asyncio.Lock()
        """Held while adapters change, so that a name means one thing for all engines."""
        self._using = asyncio.Lock()
        """Held while an adapter is looked for that may have to be loaded, so that it is loaded once."""

    async def start(self, *, again: bool = False) -> None:
        """Load the adapters of --lora-modules, or, if the server had started before and engines have some
        adapters, take these as they are. Raises ConfigError if one cannot be loaded."""
        for module in () if again and self._engines.states else self._options.modules:
            if error := await self._load(module.name, module.path, module.labels, pinned=module.pinned):
                raise ConfigError(f"--lora-modules: {module.name}: {error}")
        self.has_started = True

    @property
    def states(self) -> Sequence[AdapterState]:
        return list(self._engines.states.values())

    def find(self, name: str) -> AdapterState | None:
        """The adapter of a name, which may stand behind the model's and a colon."""
        names = self.frontend.facts.model_names
        found = self._engines.states.get(name) or self._engines.states.get(name.removesuffix(TAG))
        base, colon, own = name.partition(":")
        return found or (self._engines.states.get(own) if colon and base in names else None)

    def adapted(self, state: AdapterState) -> Frontend:
        """The frontend for one request that an adapter answers."""
        own = copy.copy(self.frontend)
        changes = {
            "_facts": facts_with(self.frontend.facts, state),
            "_reading_context": None,
            "metrics": self.frontend.metrics.of_adapter(state.adapter.name),
            "_client": _AdaptedClient(self.frontend.client, state.adapter.digest),
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
        """The adapter of a folder, which is loaded unless it is there. Raises BadRequest if it cannot be."""
        async with self._using:
            known = self._engines.states.get(name)
            try:
                if known is not None and is_current(known.adapter, path):
                    return known
            except OSError as error:
                raise BadRequest(str(error), "lora_request") from error
            if error := await self._load(name, path, []):
                raise BadRequest(f"LoRA adapter '{name}' could not be loaded. {error}", "lora_request")
            return self._engines.states[name]

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter from below --lora-dir into all engines. Raises ApiError if it cannot be."""
        folder = await asyncio.to_thread(self._allowed, path)
        if name in self.frontend.facts.model_names:
            raise BadRequest(f"`{name[:200]}` is a name of the model itself.", "lora_name")
        if name in self._engines.states and not in_place:
            raise BadRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True."
            )
        if error := await self._load(name, str(folder), []):
            raise BadRequest(f"LoRA adapter '{name}' was found but could not be loaded. {error}", "lora_path")

    async def unload(self, name: str) -> None:
        if name not in self._engines.states:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", "lora_name")
        async with self._lock:
            await self._engines.drop(name)

    def _allowed(self, path: str) -> Path:
        """The real path of a folder that clients may have loaded. Raises BadRequest for others."""
        roots = [Path(root).expanduser().resolve() for root in self._options.lora_dir]
        if not roots:
            raise BadRequest("No folder is open for adapters: start the server with --lora-dir.", "lora_path")
        for root in roots:
            try:
                found = (root / path).resolve()
                if found.is_relative_to(root) and found != root and found.is_dir():
                    return found
            except (OSError, ValueError, RuntimeError):  # a path that no file can have
                continue
        raise BadRequest("There is no such folder below those of --lora-dir.", "lora_path")

    async def _load(self, name: str, path: str, labels: list[str], *, pinned: bool = False) -> str:
        """Have all engines load an adapter; returns why one cannot, or an empty text."""
        try:
            adapter = await asyncio.to_thread(read_named, name, path, self.frontend.config)
        except (ConfigError, OSError) as error:
            return str(error)
        template = Path(adapter.folder) / "chat_template.jinja"
        if (
            template.is_file()
            and template.read_text("utf-8", "replace") not in self.frontend.tokenizer.chat.sources
        ):
            _log.warning("adapter %s: its chat template is not used, but that of the model", name)
        async with self._lock:
            return await self._engines.load(replace(adapter, labels=tuple(labels), pinned=pinned))
