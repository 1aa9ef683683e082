"""Start the engines of this machine and end them: a private folder of sockets, their lives, their exit codes.

Used by the process that holds everything together, which may or may not be an API server itself.
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
"""How often in a row an engine is started again."""
FIRST_PAUSE = 1.0
"""Seconds before that; each further pause is twice as long."""
LONG_LIFE = 300.0
"""Seconds of life after which earlier deaths are forgotten."""

_LONGEST_PARENT = 75  # a socket's path may have 107 characters on Linux, 103 elsewhere; ours add 28

_log = logging.getLogger(__name__)


class EngineHandle:
    """A started engine. Whoever holds it keeps the engine alive."""

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
        await ended(self.process)
        return self.process.wait()


class Fleet:
    """All engines of this machine."""

    def __init__(
        self,
        engines: list[EngineHandle],
        folder: tempfile.TemporaryDirectory[str],
        addresses: list[Address],
        *,
        restarts: bool,
    ) -> None:
        self.engines = engines
        self.addresses = addresses
        """One for each API server of this machine, which gives it to its EngineClient."""
        self._folder = folder
        self._restarts = restarts

    @property
    def run_folder(self) -> Path:
        """Private to this run, and gone after it."""
        return Path(self._folder.name)

    async def keep(self, lost: Callable[[int, int], None] = lambda number, code: None) -> None:
        """Follows every engine; one that breaks is started again, if it is one of several.

        Returns when none is left. `lost` is called at each end with the engine's number and the exit code.
        """
        await asyncio.gather(*(self._keep(engine, lost) for engine in self.engines))

    async def _keep(self, engine: EngineHandle, lost: Callable[[int, int], None]) -> None:
        deaths = 0
        while True:
            code = await engine.exited()
            lost(engine.number, code)
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
        """Ask all of them to end. Asked again, they do not wait for their requests."""
        for engine in self.engines:
            engine.process.terminate()

    def stop(self, seconds: float) -> list[int]:
        """End all of them, by force those that have not ended by themselves after `seconds`, and clean up."""
        self.terminate()
        until = time.monotonic() + seconds
        for engine in self.engines:
            if not engine.process.ended_within(max(0.0, until - time.monotonic())):
                engine.process.kill()
        codes = [engine.process.wait() for engine in self.engines]
        self._folder.cleanup()
        return codes


def launch(
    config: EngineConfig,
    replicas: Replicas = Replicas(),
    *,
    api_servers: int = 1,
    doors: Sequence[Address] = (),
    drain_seconds: float = 0.0,
    log_level: str = "info",
    module: str = "engine_core.process",
) -> Fleet:
    """Returns as soon as the processes are started. `module` is what `python -m` runs.

    The API servers are on this machine, or where `doors` says.
    """
    _check_length(Path(tempfile.gettempdir()))
    folder = tempfile.TemporaryDirectory(prefix="facet-")  # mode 0700: what listens in it is ours alone
    addresses = list(doors) or [_address(folder.name, index) for index in range(api_servers)]
    engines = [
        EngineHandle(
            ProcessConfig(
                engine=config,
                servers=addresses,
                index=number,
                alone=replicas.size == 1,
                local_index=index,
                local_engines=replicas.here,
                folder=folder.name,
                drain_seconds=drain_seconds,
                log_level=log_level,
            ),
            module,
        )
        for index, number in enumerate(replicas.local)
    ]
    return Fleet(engines, folder, addresses, restarts=replicas.size > 1)


async def ended(process: child.Child) -> None:
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
