"""Looks for adapters that requests name and nobody has loaded: in folders, then on the hub."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from models.checkpoint.hub import HubError, download_adapter
from models.lora_config import CONFIG_FILE
from models.plain_files import ConfigError, read_object
from server.errors import ApiError, BadRequest, NotFound
from server.options.adapter_options import is_adapter_name
from server.options.server_flags import ServerConfig

MISS_SECONDS = 10.0
"""Seconds for which nothing is looked for again that was not found, or cannot be loaded."""
_MOST_MISSES = 1024

_log = logging.getLogger(__name__)


def folder_below(roots: list[str], path: str) -> Path | None:
    """The real path of a folder below one of these; None if there is none."""
    for root in (Path(each).expanduser().resolve() for each in roots):
        try:
            found = (root / path).resolve()
            if found.is_relative_to(root) and found != root and found.is_dir():
                return found
        except (OSError, ValueError, RuntimeError):  # a path that no file can have
            continue
    return None


def may_be_downloaded(repositories: list[str], name: str) -> bool:
    """Whether a name is that of a repository, or of a folder in one of these."""
    allowed = any(name == each or name.startswith(f"{each}/") for each in repositories)
    return allowed and is_adapter_name(name)


class AdapterResolver:
    """Finds the adapter of each name once, however many requests ask for it."""

    def __init__(self, config: ServerConfig, load: Callable[[str, str, Path], Awaitable[str]]) -> None:
        """`load` loads an adapter by its name and source from a folder; returns why it cannot, if so."""
        self._config, self._options, self._load = config, config.adapters, load
        self._searches: dict[str, asyncio.Task[ApiError | None]] = {}
        self._misses: dict[str, tuple[float, ApiError]] = {}
        """Names that were not found -> until when that counts, and the answer to requests."""

    async def load(self, name: str, unknown: NotFound) -> None:
        """Find an adapter and load it. Raises ApiError if it cannot be: `unknown` if there is none."""
        if (search := self._searches.get(name)) is None:
            until, error = self._misses.get(name, (0.0, unknown))
            if until > time.monotonic():
                raise type(error)(error.message, error.param)
            search = self._searches[name] = asyncio.create_task(self._search(name, unknown))
            search.add_done_callback(lambda _: self._searches.pop(name))
        if (error := await asyncio.shield(search)) is not None:  # it goes on for others if this client leaves
            raise type(error)(error.message, error.param)

    async def _search(self, name: str, unknown: NotFound) -> ApiError | None:
        self._misses.pop(name, None)
        try:
            folder = await asyncio.to_thread(self._find, name)
            if folder is None:
                error = unknown
            elif why := await self._load(name, name, folder):
                error = BadRequest(f"LoRA adapter '{name}' was found but could not be loaded. {why}", "model")
            else:
                return None
        except (HubError, ConfigError, OSError) as failure:
            _log.warning("adapter %s: %s", name, failure)
            error = NotFound(f"The model `{name}` does not exist: its adapter cannot be read.", "model")
        except ApiError as failure:
            error = failure
        while len(self._misses) >= _MOST_MISSES:
            del self._misses[next(iter(self._misses))]
        self._misses[name] = time.monotonic() + MISS_SECONDS, error
        return error

    def _find(self, name: str) -> Path | None:
        """The folder of an adapter for this model. Raises NotFound if it is for another one."""
        if not is_adapter_name(name):
            return None
        found = folder_below(self._options.lora_dir, name)
        if found is not None and not (found / CONFIG_FILE).is_file():
            found = None
        if found is None and may_be_downloaded(self._options.lora_repos, name):
            found = download_adapter(name, self._config.engine.download_dir)
        if found is not None and (base := self._other_base(found)):
            raise NotFound(
                f"The model `{name}` does not exist here: it is an adapter of {base}, and this server has "
                f"{' and '.join(self._config.model_names)}.",
                "model",
            )
        return found

    def _other_base(self, folder: Path) -> str:
        """The model for which an adapter was trained, if that is another one. Only last parts of names count,
        as the same model may lie in folders and on the hub."""
        base = read_object(folder / CONFIG_FILE).get("base_model_name_or_path")
        last = str(base or "").rstrip("/").rpartition("/")[2]
        own = {
            name.rstrip("/").rpartition("/")[2]
            for name in (*self._config.model_names, self._config.engine.model)
        }
        return last if last.lower() not in {"", *(name.lower() for name in own)} else ""
