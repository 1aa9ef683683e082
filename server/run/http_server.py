"""uvicorn's server, which ends as we say: it stops listening early and closes connections late."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import State

from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels
from server.http.connection.connection import Connection
from server.http.connection.connection_limits import most_connections
from server.http.connection.deadline_timer import DeadlineTimer
from server.http.connection.hosts_and_proxies import TrustedProxies
from server.http.connection.refusal_log import RefusalLog
from server.http.connection.shared_limits import Shared
from server.http.connection.sockets import RenewableTls
from server.http.middleware import AccessLog
from server.options.server_flags import ServerConfig
from server.run.app import create_app, early_admission

FLUSH_SECONDS = 3.0
"""Seconds for complete answers to reach their clients after all generation has ended."""
NEWCOMER_SECONDS = 0.1
"""Seconds for a client that has connected and sent nothing yet to send a request, which is refused."""
_TICK_SECONDS = 1.0  # uvicorn's own header with the date is exact to a second


class HttpServer(uvicorn.Server):
    def __init__(
        self, config: ServerConfig, frontend: Frontend | ManyModels, work_folder: Path | None = None
    ) -> None:
        """`work_folder` is for files and batches, if the configuration names no folder."""
        self._config = config
        self._tls = RenewableTls(config.connections)
        options = _uvicorn_config(config, frontend, create_app(frontend, work_folder))
        options.load()
        options.ssl = self._tls.context
        super().__init__(options)
        self._over = asyncio.Event()

    @property
    def state(self) -> State:
        """What routes find beside the frontend."""
        return cast(FastAPI, self.config.app).state

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Catches none: uvicorn would close the port while /ready must answer."""
        yield

    async def main_loop(self) -> None:
        while not self._over.is_set():
            await self.on_tick(0)
            if self._config.connections.enable_ssl_refresh:
                self._tls.reload_if_changed()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _TICK_SECONDS)

    def stop_listening(self) -> None:
        """Leave new connections to others. Open ones are served as before."""
        if self.started:
            for server in self.servers:
                server.close()

    def end(self) -> None:
        """Let `serve` close all connections and return."""
        self._over.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections: idle ones at once, and others when they have their answer."""
        self.stop_listening()
        state, loop = self.server_state, asyncio.get_running_loop()
        began = loop.time()
        while state.connections and loop.time() < began + FLUSH_SECONDS:
            newcomers_may_wait = loop.time() < began + NEWCOMER_SECONDS
            for connection in list(state.connections):
                if getattr(connection, "cycle", None) is not None or not newcomers_may_wait:
                    connection.shutdown()
            await asyncio.sleep(0.005)
        for task in state.tasks:
            task.cancel()

    def reload_certificate(self) -> None:
        """Use the certificate that the files hold now, if it is usable, for new connections."""
        self._tls.reload()


def _root_remover(root: str, app: FastAPI) -> Callable[[bytes], bytes]:
    """A function that takes this prefix from targets, but for those that begin as a path of ours does.

    uvicorn expects that a proxy has taken it away.
    """
    prefix = f"{root}/"
    ours = tuple(path.partition("{")[0].encode() for path in app.state.paths if path.startswith(prefix))

    def below_root(target: bytes) -> bytes:
        is_below = root and target.startswith(prefix.encode()) and not target.startswith(ours)
        return target[len(root) :] if is_below else target

    return below_root


def _uvicorn_config(config: ServerConfig, frontend: Frontend | ManyModels, app: FastAPI) -> uvicorn.Config:
    if not config.log.disable_uvicorn_access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    options = uvicorn.Config(
        app,
        loop="none",  # it runs in ours
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=not config.log.disable_uvicorn_access_log,
        proxy_headers=False,  # connections read them, and more strictly
        server_header=False,
        root_path=config.root_path,
        backlog=2048,
    )
    loop = asyncio.get_running_loop()
    shared = Shared(
        most_connections(config.max_connections, config.data_parallel_size),
        DeadlineTimer(loop.time, loop.call_later),
        RefusalLog(loop.call_later),
        on_refusal=lambda status: frontend.metrics.http("none", "OTHER", status, 0.0),
        access_log=AccessLog(config.log.quiet_paths),
        check_head=early_admission(frontend),
        below_root=_root_remover(config.root_path.rstrip("/"), app),
        proxies=TrustedProxies(options.forwarded_allow_ips),
        max_head=config.connections.h11_max_incomplete_event_size,
        max_headers=config.connections.h11_max_header_count,
        keep_alive=config.connections.timeout_keep_alive,
    )
    options.http = cast(Any, partial(Connection, shared))
    return options
