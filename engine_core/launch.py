"""Start an engine process and end it: its private folder of sockets, its life, its exit code.

Used by the process that holds everything together, which may or may not be an API server itself.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec

from engine_core.config import Address, EngineConfig, ProcessConfig
from worker import child

_LONGEST_PARENT = 75  # a socket's path may have 107 characters on Linux, 103 elsewhere; ours add 28


class EngineHandle:
    """A started engine. Whoever holds it keeps the engine alive."""

    def __init__(
        self, process: child.Child, folder: tempfile.TemporaryDirectory[str], addresses: list[Address]
    ) -> None:
        self.process = process
        self.addresses = addresses
        """One for each API server, which gives it to its EngineClient."""
        self._folder = folder

    @property
    def exit_code(self) -> int | None:
        return self.process.exit_code

    @property
    def run_folder(self) -> Path:
        """Private to this run, and gone after it."""
        return Path(self._folder.name)

    async def exited(self) -> int:
        """Waits for the process to end, for whatever reason; returns its exit code."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self.process.sentinel, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self.process.sentinel)
        return self.process.wait()

    def stop(self, seconds: float) -> int:
        """End the process, by force if it has not ended by itself after `seconds`, and clean up."""
        code = self.process.stop(seconds)
        self._folder.cleanup()
        return code


def launch(
    config: EngineConfig,
    *,
    api_servers: int = 1,
    drain_seconds: float = 0.0,
    log_level: str = "info",
    module: str = "engine_core.process",
) -> EngineHandle:
    """Returns as soon as the process is started. `module` is what `python -m` runs."""
    _check_length(Path(tempfile.gettempdir()))
    folder = tempfile.TemporaryDirectory(prefix="facet-")  # mode 0700: what listens in it is ours alone
    addresses = [_address(folder.name, index) for index in range(api_servers)]
    start = ProcessConfig(engine=config, servers=addresses, drain_seconds=drain_seconds, log_level=log_level)
    return EngineHandle(child.start("engine", module, msgspec.msgpack.encode(start)), folder, addresses)


def _address(folder: str, index: int) -> Address:
    return Address(requests=f"ipc://{folder}/{index}.requests", answers=f"ipc://{folder}/{index}.answers")


def _check_length(parent: Path) -> None:
    if len(str(parent)) > _LONGEST_PARENT:
        raise ValueError(
            f"the name of {parent}, where sockets are made, has {len(str(parent))} characters, and "
            f"{_LONGEST_PARENT} at most are possible: set TMPDIR to a folder with a shorter name"
        )
