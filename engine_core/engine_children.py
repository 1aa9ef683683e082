"""Engine processes of this machine: how they are started and ended. `restarts.py` starts them again.

The process that does so may or may not be an API server itself. The engines' sockets lie in a private folder.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import msgspec

from engine_core.config import Address, EngineConfig, ProcessConfig, Replicas
from engine_core.run_folder import RunFolder
from worker import child
from worker.child import CANNOT_START, STOPPED
from worker.host.progress_page import ProgressPage

ENGINE = "engine_core.engine_main"
"""The module of an engine's process."""
RAY_REPLICA = "engine_core.ray_replicas.replica_process"
"""The module of a process that has Ray run an engine."""


class EngineProcess:
    """The process of one engine, and of those that take its place. They end when this object is dropped."""

    def __init__(
        self,
        config: ProcessConfig,
        module: str,
        folder: Path,
        start: child.Start = child.start,
    ) -> None:
        """`module` is what `python -m` runs, or `start` in its place; `folder` is that of the run."""
        self.number = config.index
        self.name = "the engine" if config.alone else f"engine {config.index}"
        if config.label:
            self.name += f" of {config.label}"
        self.starts = 0
        self.removed = False
        """Whether it shall end and not be started again, because its model is unloaded."""
        self._config = config
        self._module, self._start = module, start
        self._page_path = folder / f"engine-{config.index}.progress"
        self.start()

    def start(self) -> None:
        self.starts += 1
        self.page = ProgressPage(self._page_path)
        config = msgspec.structs.replace(
            self._config, progress_page=str(self._page_path), generation=self.starts
        )
        self.process = self._start(self.name, self._module, msgspec.msgpack.encode(config))

    @property
    def exit_code(self) -> int | None:
        return self.process.exit_code


class EngineProcesses:
    def __init__(
        self,
        make: Callable[[int], EngineProcess],
        folder: RunFolder,
        addresses: list[Address],
        replicas: Replicas,
        start_seconds: float = inf,
    ) -> None:
        """`make` starts the engine of a number.

        `start_seconds`: after so many without a sign that its start goes on, an engine is killed.
        """
        self.start_seconds = start_seconds
        self.engines = [make(number) for number in replicas.started]
        self.addresses = addresses
        """The address of each API server, which gives it to its EngineClient."""
        self.worked = False
        """Whether requests have been served. The owner sets it, and from then on an only engine that ends, or
        a group of them, is started again: before that, it is the operator who has to do something."""
        self.leaving = False
        self.follow_the_first = replicas.follow_the_first
        """Whether they leave when the first engine does, on another machine, and wait for the next."""
        self.together = replicas.together
        """Whether the engines share experts, so that all end if one does, and are started as one."""
        self._folder = folder
        self._is_one = replicas.together or len(replicas.numbers) == 1

    @property
    def run_folder(self) -> Path:
        """A folder that is private to this run, and removed after it."""
        return self._folder.path

    def may_return(self, engine: EngineProcess, code: int) -> bool:
        """Whether an engine that has exited with this code is worth another start.

        One of several that was asked to end is not, and none that could not start the first time.
        """
        if engine.removed or (self.leaving and (not self.worked or code in (STOPPED, -signal.SIGTERM))):
            return False
        if self._is_one:
            return self.worked
        return code != STOPPED and not (code == CANNOT_START and engine.starts == 1)

    def start_all(self) -> None:
        """Start all again as one. Raises OSError, and then none runs."""
        try:
            for engine in self.engines:
                engine.start()
        except OSError:
            latest = max(engine.starts for engine in self.engines)
            for engine in self.engines:
                engine.process.kill()
                engine.starts = latest  # or the next ones would look for each other in different places
            raise

    def terminate(self) -> None:
        """Ask all engines to end. Asked again, they do not wait for their requests."""
        self.leaving = True
        for engine in self.engines:
            engine.process.terminate()

    def stop(self, seconds: float) -> list[int]:
        """End all engines, by force those that live after `seconds`, and clean up; returns exit codes."""
        self.terminate()
        until = time.monotonic() + seconds
        for engine in self.engines:
            if not engine.process.ended_within(max(0.0, until - time.monotonic())):
                engine.process.kill()
        codes = [engine.process.wait() for engine in self.engines]
        self._folder.remove()
        return codes


def start_engines(
    config: EngineConfig,
    replicas: Replicas = Replicas(),
    *,
    api_servers: int = 1,
    addresses: Sequence[Address] = (),
    drain_seconds: float = 0.0,
    log_level: str = "info",
    debug_steps: bool = False,
    module: str = ENGINE,
    label: str = "",
    most_cache_bytes: int | None = None,
    start: child.Start = child.start,
) -> EngineProcesses:
    """Start the engines of this machine; returns as soon as their processes are started.

    The API servers are so many on this machine, or those at `addresses`. `module` is what `python -m` runs,
    or what `start` does in its place. The rest is for `ProcessConfig`.
    """
    from models.plugins import registrations  # after `serve` has checked whose `models` this is

    registered = registrations()
    folder = RunFolder()
    servers = list(addresses) or [_address(folder.path, index) for index in range(api_servers)]

    def make(number: int) -> EngineProcess:
        afar = number not in replicas.local
        process = ProcessConfig(
            engine=config,
            servers=[replicas.tcp_address(index) for index in range(api_servers)] if afar else servers,
            replicas=replicas,
            index=number,
            folder=str(folder.path),
            drain_seconds=drain_seconds,
            log_level=log_level,
            debug_steps=debug_steps,
            model_classes=registered.classes,
            search_path=registered.search_path,
            label=label,
            most_cache_bytes=most_cache_bytes,
        )
        return EngineProcess(process, RAY_REPLICA if afar else module, folder.path, start)

    # The first engine of a group may come much later, and what Ray does is seen by API servers only.
    waits = replicas.follow_the_first or replicas.by_ray
    return EngineProcesses(make, folder, servers, replicas, inf if waits else config.engine_ready_timeout)


def _address(folder: Path, index: int) -> Address:
    return Address(requests=f"ipc://{folder}/{index}.requests", answers=f"ipc://{folder}/{index}.answers")
