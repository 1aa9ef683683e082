"""The engines of a server of several models: a process for each model that is loaded, and for its replicas.

They are forked from a process that has imported torch, and share its pages. Which are loaded is decided by
the API process, which knows what is asked for; it says so in reports.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from engine_core.config import Address
from engine_core.engine_children import ENGINE, EngineProcess, EngineProcesses, start_engines
from engine_core.restarts import keep_engines
from engine_core.run_folder import RunFolder
from server.options.model_list import ModelEntry, uses_cards
from server.options.option_parsing import OptionError
from server.options.server_flags import ServerConfig
from server.run.api_children import (
    LOAD,
    WORKS,
    ApiProcess,
    EngineExited,
    EngineGivenUp,
    EngineStalled,
    Message,
    ModelEnded,
    ModelsChanged,
    ModelStarted,
)
from server.run.fork_server import ForkServer, reap_others
from worker import child
from worker.child import Child

IMPORTS = (ENGINE, "worker.runner", "llguidance")
"""What engines import, torch among it."""
PREPARE = ("worker.kernels.cpu.operations:prove_in_a_fork",)
"""What is done once for all of them on a CPU."""
REAP_SECONDS = 1.0
UNLOAD_SECONDS = 10.0
"""Seconds for an engine to end that has nothing left to do; then it is killed."""

_log = logging.getLogger(__name__)


class ModelProcesses:
    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[ModelEntry],
        read: Callable[[Sequence[ModelEntry]], list[ModelEntry]],
    ) -> None:
        """`read` reads what the models are now, knowing those of before; it raises OptionError."""
        self.worked = self.leaving = False
        self.models = {entry.id: entry for entry in models}
        self._read = read
        self._folder = RunFolder()
        self._forks: ForkServer | None = None
        self._imported = asyncio.Event()
        """Set when engines can be started."""
        if sys.platform == "linux":  # elsewhere engines are started like any others
            self._forks = ForkServer(IMPORTS, () if uses_cards(config) else PREPARE)
        self._kept: dict[int, asyncio.Task[None]] = {}
        """What starts the engine of a model, keeps it running and waits for its end."""
        self._running: dict[int, EngineProcesses] = {}
        self._tell: Callable[[Message], None] = lambda message: None

    @property
    def run_folder(self) -> Path:
        return self._folder.path

    @property
    def addresses(self) -> list[Address]:
        """One for the only API process, which listens at others: each model has its own."""
        return [Address(requests="", answers="")]

    @property
    def engines(self) -> list[EngineProcess]:
        return [engine for each in self._running.values() for engine in each.engines]

    async def keep(self, servers: Iterable[ApiProcess], tell: Callable[[Message], None]) -> None:
        """Do what reports say, until it is cancelled; `tell` tells API processes what becomes of engines."""
        self._tell = tell
        if self._forks is None:
            self._imported.set()
            return
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._forks.descriptor, readable.set)
        await readable.wait()
        loop.remove_reader(self._forks.descriptor)
        self._forks.begin()
        self._imported.set()
        while True:
            await asyncio.sleep(REAP_SECONDS)
            processes = [server.process for server in servers] + [engine.process for engine in self.engines]
            reap_others({self._forks.process.pid, *(process.pid for process in processes)})

    def act(self, report: str, id: int, most_cache_bytes: int = 0) -> None:
        """Do what the API process reports of a model, whose caches are bounded for a load."""
        if report == WORKS:
            if id in self._running:
                self._running[id].worked = True
        elif report != LOAD:
            self._unload(id)
        elif id not in self._kept and id in self.models and not self.leaving:
            self._kept[id] = asyncio.get_running_loop().create_task(
                self._keep(self.models[id], most_cache_bytes)
            )

    def reread(self) -> None:
        """Read again what the models are. What cannot be read changes nothing."""
        try:
            found = self._read(list(self.models.values()))
        except OptionError as error:
            _log.error("the models stay as they were: %s", error)
            return
        self.models |= {entry.id: entry for entry in found}
        _log.info("the models are now %s", ", ".join(entry.name for entry in found))
        self._tell(ModelsChanged(found))

    async def _keep(self, entry: ModelEntry, most_cache_bytes: int) -> None:
        """Run the engines of a model until all have ended for good, which API processes are told."""
        watcher, reason = _Watcher(entry.id, self._tell), ""
        await self._imported.wait()
        try:
            engines = self._start(entry, most_cache_bytes)
            await keep_engines(engines, watcher)
            reason = watcher.reason
        except OSError as error:
            reason = f"the engine cannot be started: {error.strerror}"
        finally:
            if (ended := self._running.pop(entry.id, None)) is not None:
                ended.stop(0)
            del self._kept[entry.id]
            self._tell(ModelEnded(entry.id, reason))

    def _start(self, entry: ModelEntry, most_cache_bytes: int) -> EngineProcesses:
        config = entry.config
        pids = dict[str, int]()
        """The processes of engines, by their names."""

        def start(name: str, module: str, payload: bytes, /) -> Child:
            process = (self._forks or child).start(name, module, payload)
            pids[name] = process.pid
            if (engines := self._running.get(entry.id)) is not None:  # in the place of one that has ended
                self._tell(ModelStarted(entry.id, engines.addresses[0], list(pids.values())))
            return process

        engines = self._running[entry.id] = start_engines(
            config.engine,
            config.replicas,
            drain_seconds=config.shutdown_timeout,
            log_level=config.log.style,
            debug_steps=config.log.debug_steps,
            label=entry.name,
            most_cache_bytes=most_cache_bytes,
            start=start,
        )
        self._tell(ModelStarted(entry.id, engines.addresses[0], list(pids.values())))
        return engines

    def _unload(self, id: int) -> None:
        """Have the engines of a model end, which have nothing to do."""
        if (engines := self._running.get(id)) is None:
            return
        if any(engine.exit_code is not None for engine in engines.engines):  # it may be started in a moment
            self._kept[id].cancel()
            return
        for engine in engines.engines:
            engine.removed = True
            engine.process.terminate()
            asyncio.get_running_loop().call_later(UNLOAD_SECONDS, partial(_end, engine.process))

    def terminate(self) -> None:
        self.leaving = True
        for engines in self._running.values():
            engines.terminate()

    def stop(self, seconds: float) -> None:
        """End all engines, by force those that live after `seconds`, and clean up."""
        self.terminate()
        until = time.monotonic() + seconds
        for engines in self._running.values():
            engines.stop(max(0.0, until - time.monotonic()))
        if self._forks is not None:
            self._forks.process.kill()
            self._forks.process.wait()
        self._folder.remove()


class _Watcher:
    """Tells API processes what becomes of the engines of one model."""

    def __init__(self, model: int, tell: Callable[[Message], None]) -> None:
        self.reason = ""
        """Why the last one that has ended is not started again."""
        self._model, self._tell = model, tell

    def engine_exited(self, number: int, code: int) -> None:
        self._tell(EngineExited(number, code, time.monotonic(), model=self._model))

    def engine_given_up(self, number: int, reason: str, *, explained: bool) -> None:
        self.reason = reason
        self._tell(EngineGivenUp(number, reason, explained, model=self._model))

    def engine_stalled(self, number: int, stalled: bool) -> None:
        self._tell(EngineStalled(number, stalled, model=self._model))


def _end(process: Child) -> None:
    with suppress(ProcessLookupError):
        if process.exit_code is None:
            process.kill()
