"""The API processes as the supervisor sees them: they are started, started again, and told what happens."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine_core.engine_processes import EngineProcesses
from server.options.server_config import ServerConfig
from server.run.supervisor_messages import ApiConfig, EngineGivenUp, EngineStalled, Message, Served
from worker import child
from worker.host.progress_page import ProgressPage

_encode = msgspec.msgpack.Encoder().encode


class ApiProcess:
    """One API process, and those that take its place. They end when this object is dropped."""

    def __init__(self, config: ApiConfig) -> None:
        self.name = "the API server" if config.shared_metrics is None else f"API server {config.index}"
        self.stalled = False
        """Whether its event loop does not go on."""
        self._config = config
        self._told: dict[int, EngineGivenUp | EngineStalled] = {}
        """The last message on each engine that holds until there is another."""
        self.start()

    def start(self) -> None:
        self.page = ProgressPage(Path(self._config.progress_page))
        inherit = [self._config.listener, self._config.reports]
        self.process = child.start(
            f"api {self._config.index}", "server.run.api_process", _encode(self._config), inherit
        )
        for message in self._told.values():
            self.process.tell(_encode(message))

    def note_that_it_served(self) -> None:
        self._config = msgspec.structs.replace(self._config, first=False)

    def tell(self, message: Message) -> None:
        """Send a message to the process. What holds on is also sent to those in its place."""
        if isinstance(message, EngineGivenUp | EngineStalled):
            self._told[message.number] = message
        self.process.tell(_encode(message))


class ApiProcesses:
    """All API processes, which share one listening socket. They run when this object is there."""

    def __init__(
        self, config: ServerConfig, listener: socket.socket, engines: EngineProcesses, started: float
    ) -> None:
        shared = None
        if config.api_server_count > 1:
            shared = engines.run_folder / "metrics"
            shared.mkdir(mode=0o700)
        self.reports, reports = os.pipe()
        """A descriptor that becomes readable once requests are served."""
        self._servers = [
            ApiProcess(
                ApiConfig(
                    config=config,
                    address=address,
                    index=index,
                    listener=listener.fileno(),
                    reports=reports,
                    progress_page=str(engines.run_folder / f"api-{index}.progress"),
                    shared_metrics=None if shared is None else str(shared),
                    started=started,
                )
            )
            for index, address in enumerate(engines.addresses)
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
