"""Engine processes of this machine: how they are started, followed and ended.

The process that does so may or may not be an API server itself. The engines' sockets lie in a private folder.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from engine_core.config import Address, EngineConfig, ProcessConfig, Replicas
from worker import child
from worker.child import CANNOT_START, STOPPED

RESTARTS = 5
"""The number of times in a row that an engine is started again."""
FIRST_PAUSE = 1.0
"""Seconds before the first restart; each further pause is twice as long."""
LONG_LIFE = 300.0
"""Seconds of life after which earlier deaths do not count."""

_LONGEST_PARENT = 75  # a socket's path may have 107 characters on Linux, 103 elsewhere; ours add 28

_log = logging.getLogger(__name__)


class EngineProcess:
    """The process of one engine, and of those that take its place. They end when this object is dropped."""

    def __init__(self, config: ProcessConfig, module: str) -> None:
        self.number = config.index
        self._config = config
        self._module = module
        self.start()

    def start(self) -> None:
        self.started = time.monotonic()
        self.process = child.start(
            f"engine {self.number}", self._module, msgspec.msgpack.encode(self._config)
        )

    @property
    def exit_code(self) -> int | None:
        return self.process.exit_code

    async def exited(self) -> int:
        """Waits for the process to end, for whatever reason; returns its exit code."""
        await wait_for_end(self.process)
        return self.process.wait()


class EngineProcesses:
    """All engine processes of this machine."""

    def __init__(
        self,
        engines: list[EngineProcess],
        folder: tempfile.TemporaryDirectory[str],
        addresses: list[Address],
        *,
        restarts: bool,
    ) -> None:
        self.engines = engines
        self.addresses = addresses
        """The address of each API server, which gives it to its EngineClient."""
        self._folder = folder
        self._restarts = restarts

    @property
    def run_folder(self) -> Path:
        """A folder that is private to this run, and removed after it."""
        return Path(self._folder.name)

    async def supervise(self, on_exit: Callable[[int, int], None] = lambda number, code: None) -> None:
        """Follows every engine until none is left; one of several that breaks is started again.

        `on_exit` is called at each end with the engine's number and the exit code.
        """
        await asyncio.gather(*(self._supervise(engine, on_exit) for engine in self.engines))

    async def _supervise(self, engine: EngineProcess, on_exit: Callable[[int, int], None]) -> None:
        deaths = 0
        while True:
            code = await engine.exited()
            on_exit(engine.number, code)
            deaths = 1 if time.monotonic() - engine.started > LONG_LIFE else deaths + 1
            if not self._restarts or code in (STOPPED, CANNOT_START):
                return  # it was asked to end, or would fail to start again
            if deaths > RESTARTS:
                _log.error("engine %d broke %d times in a row: it is given up", engine.number, deaths)
                return
            pause = FIRST_PAUSE * 2 ** (deaths - 1)
            how = child.describe_exit(code)
            _log.error("engine %d broke: %s; it is started again in %g s", engine.number, how, pause)
            await asyncio.sleep(pause)
            engine.start()

    def terminate(self) -> None:
        """Ask all engines to end. Asked again, they do not wait for their requests."""
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
        self._folder.cleanup()
        return codes


def start_engines(
    config: EngineConfig,
    replicas: Replicas = Replicas(),
    *,
    api_servers: int = 1,
    addresses: Sequence[Address] = (),
    drain_seconds: float = 0.0,
    log_level: str = "info",
    module: str = "engine_core.process",
) -> EngineProcesses:
    """Start the engines of this machine; returns as soon as their processes are started.

    The API servers are so many on this machine, or those at `addresses`. `module` is what `python -m` runs.
    """
    from models.plugins import registrations  # after `serve` has checked whose `models` this is

    registered = registrations()
    _check_length(Path(tempfile.gettempdir()))
    folder = tempfile.TemporaryDirectory(prefix="facet-")  # mode 0700: only this user can connect
    servers = list(addresses) or [_address(folder.name, index) for index in range(api_servers)]
    engines = [
        EngineProcess(
            ProcessConfig(
                engine=config,
                servers=servers,
                index=number,
                alone=replicas.size == 1,
                local_index=index,
                local_engines=replicas.here,
                folder=folder.name,
                drain_seconds=drain_seconds,
                log_level=log_level,
                model_classes=registered.classes,
                search_path=registered.search_path,
            ),
            module,
        )
        for index, number in enumerate(replicas.local)
    ]
    return EngineProcesses(engines, folder, servers, restarts=replicas.size > 1)


async def wait_for_end(process: child.Child) -> None:
    """Waits for a child process to end, without a thread."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(process.sentinel, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process.sentinel)


def _address(folder: str, index: int) -> Address:
    return Address(requests=f"ipc://{folder}/{index}.requests", answers=f"ipc://{folder}/{index}.answers")


def _check_length(parent: Path) -> None:
    if len(str(parent)) > _LONGEST_PARENT:
        raise ValueError(
            f"the name of {parent}, where sockets are made, has {len(str(parent))} characters, and "
            f"{_LONGEST_PARENT} at most are possible: set TMPDIR to a folder with a shorter name"
        )
