"""The API processes as the supervisor sees them: they are started, started again, and told what happens, by
messages.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from engine_core.config import Address
from server.options.model_list import ModelEntry
from server.options.server_flags import ServerConfig
from worker import child
from worker.host.progress_page import ProgressPage

SERVED = "served"
"""The report of the first API process that requests are served."""
LOAD, UNLOAD, WORKS = "load", "unload", "works"
"""Reports on one of several models, with its id: it is to be loaded, with at most so many bytes of caches if
its options do not say how many; to go; or has answered."""
NOTHING_LEFT = 3
"""The exit code of an API process that need not be started again, because no engine is left."""


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The message with which an API process starts."""

    config: ServerConfig
    address: Address
    models: list[ModelEntry] = []
    """All models, if the server has several; `config` is then that of the first, whose options that are no
    model's are those of all. Each has an address of its own."""
    index: int
    listener: int
    """The inherited file descriptor of the shared listening socket."""
    reports: int
    """The inherited descriptor of a pipe, for lines: the reports that are named above."""
    progress_page: str
    """The file in which the event loop shows that it goes on."""
    shared_metrics: str | None
    """The folder in which several API processes share their metrics; None if there is one."""
    work_folder: str
    """The folder of files and batches, if none is named: it ends with the server."""
    started: float
    """Start of the command on the monotonic clock, which all processes share."""
    first: bool = True
    """Whether the server has not served yet. Later, the process takes another one's place."""


class EngineExited(msgspec.Struct, frozen=True, tag=True):
    number: int
    code: int
    at: float
    """When, on the monotonic clock."""
    model: int = 0
    """The id of its model, if the server has several."""


class EngineGivenUp(msgspec.Struct, frozen=True, tag=True):
    """An engine has exited and is not started again."""

    number: int
    reason: str
    explained: bool
    model: int = 0


class EngineStalled(msgspec.Struct, frozen=True, tag=True):
    """An engine has work and makes no progress, or goes on if `stalled` is false."""

    number: int
    stalled: bool
    model: int = 0


class ModelStarted(msgspec.Struct, frozen=True, tag=True):
    """The engines of one of several models are these processes from now on."""

    model: int
    address: Address
    pids: list[int]


class ModelEnded(msgspec.Struct, frozen=True, tag=True):
    """The engines of one of several models have ended for good."""

    model: int
    reason: str


class ModelsChanged(msgspec.Struct, frozen=True, tag=True):
    """These are the models from now on."""

    models: list[ModelEntry]


class Served(msgspec.Struct, frozen=True, tag=True):
    """The first API process serves requests: the others listen too, once they can."""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The server will end: /ready shall say so, while requests are served as before until SIGTERM."""


class CutOff(msgspec.Struct, frozen=True, tag=True):
    """Running requests shall not be waited for any longer."""


class Reload(msgspec.Struct, frozen=True, tag=True):
    """Files that may be replaced while the server runs shall be read again."""


OfModel = EngineExited | EngineGivenUp | EngineStalled | ModelStarted | ModelEnded
"""Messages on the engines of a model."""
Message = OfModel | ModelsChanged | Served | Leaving | CutOff | Reload


_encode = msgspec.msgpack.Encoder().encode


class ApiProcess:
    """One API process, and those that take its place. They end when this object is dropped."""

    def __init__(self, config: ApiConfig) -> None:
        self.name = "the API server" if config.shared_metrics is None else f"API server {config.index}"
        self.stalled = False
        """Whether its event loop does not go on."""
        self._config = config
        self._told: dict[tuple[int, int | None], EngineGivenUp | EngineStalled | ModelStarted] = {}
        """The last message on each engine that holds until there is another, by its model and its number, or
        None for what says which process it is."""
        self.start()

    def start(self) -> None:
        self.page = ProgressPage(Path(self._config.progress_page))
        inherit = [self._config.listener, self._config.reports]
        self.process = child.start(
            f"api {self._config.index}", "server.run.api_main", _encode(self._config), inherit
        )
        for message in self._told.values():
            self.process.tell(_encode(message))

    def note_that_it_served(self) -> None:
        self._config = msgspec.structs.replace(self._config, first=False)

    def tell(self, message: Message) -> None:
        """Send a message to the process. What holds on is also sent to those in its place."""
        match message:
            case ModelStarted():
                self._told[message.model, None] = message
            case ModelEnded():  # whoever comes later does not know that it was there
                self._told = {key: told for key, told in self._told.items() if key[0] != message.model}
            case EngineGivenUp() | EngineStalled():
                self._told[message.model, message.number] = message
            case ModelsChanged():
                self._config = msgspec.structs.replace(self._config, models=message.models)
            case _:
                pass
        self.process.tell(_encode(message))


class ApiProcesses:
    """All API processes, which share one listening socket. They run when this object is there."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        folder: Path,
        addresses: Sequence[Address],
        started: float,
        models: Sequence[ModelEntry] = (),
    ) -> None:
        """`folder` is that of the run; each process gets one of the addresses; the rest is in `ApiConfig`."""
        shared = None
        if config.api_server_count > 1:
            shared = folder / "metrics"
            shared.mkdir(mode=0o700)
        self.reports, reports = os.pipe()
        """The descriptor from which lines of API processes are read."""
        self._servers = [
            ApiProcess(
                ApiConfig(
                    config=config,
                    address=address,
                    index=index,
                    listener=listener.fileno(),
                    reports=reports,
                    progress_page=str(folder / f"api-{index}.progress"),
                    shared_metrics=None if shared is None else str(shared),
                    work_folder=str(folder / "work"),
                    started=started,
                    models=list(models),
                )
            )
            for index, address in enumerate(addresses)
        ]

    def __iter__(self) -> Iterator[ApiProcess]:
        return iter(self._servers)

    def tell(self, message: Message) -> None:
        for server in self._servers:
            server.tell(message)

    def note_that_it_served(self) -> None:
        for server in self._servers:
            server.note_that_it_served()
        self.tell(Served())

    @property
    def running(self) -> list[child.Child]:
        return [server.process for server in self._servers if server.process.exit_code is None]
