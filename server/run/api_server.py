"""The life of one API process: listen, follow the engine's start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import runpy
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from engine_core.client.client import EngineClient
from engine_core.config import Address
from engine_core.protocol import Progress
from server.app import create_app
from server.errors import ApiError
from server.frontend import Frontend
from server.metrics import Metrics
from server.options.table import ServerConfig
from server.run.progress import ProgressDisplay
from worker.child import BROKE, CANNOT_START, STOPPED

FLUSH_SECONDS = 3
"""Seconds for complete answers to reach their clients after all generation has ended."""
STATS_SECONDS = 10.0
NO_ENGINE_LEFT = signal.SIGUSR1
"""The signal for API processes that the engines, which are not their own children, have all ended."""

_log = logging.getLogger(__name__)


class _HttpServer(uvicorn.Server):
    """An uvicorn server without signal handlers: uvicorn's would close the port while /ready must answer."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        address: Address,
        *,
        started: float,
        index: int = 0,
        display: ProgressDisplay | None = None,
        shared_metrics: Path | None = None,
    ) -> None:
        """Call this in the server's event loop. `display` is for the one process with the terminal."""
        self._config = config
        self._listener = listener
        self._started = started
        self._display = display
        self.client = EngineClient(
            address,
            config.replicas,
            server=index,
            servers=config.api_server_count,
            watched=config.api_server_count == 1,
            on_progress=self._show,
        )
        self._frontend = Frontend(config, self.client, Metrics(config.model_names[0], shared_metrics))
        self._http = _HttpServer(_uvicorn_config(config, self._frontend))
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    async def run(self) -> int:
        """Serves until a signal comes or no engine is left; returns the exit code."""
        self._catch_signals()
        http = asyncio.create_task(self._http.serve([self._listener]))
        start = asyncio.create_task(self._follow_start())
        stats = asyncio.create_task(self._log_stats())
        try:
            code = await self._serve(http, start)
        finally:
            start.cancel()
            stats.cancel()
        if self._display is not None:
            self._display.done()
        await self._leave(http)
        return code

    async def _serve(self, http: asyncio.Task[None], start: asyncio.Task[bool]) -> int:
        stopped = asyncio.create_task(self._stop.wait())
        died = asyncio.create_task(self.client.died.wait())
        try:
            await asyncio.wait((start, stopped, died, http), return_when=asyncio.FIRST_COMPLETED)
            served = start.done() and start.result()
            await asyncio.wait((stopped, died, http), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            died.cancel()
        if self._stop.is_set():
            await self._drain()
            return STOPPED
        if self.client.dead is None:
            return BROKE  # uvicorn ended by itself, and has logged why
        return self._explain_death(served=served)

    async def _follow_start(self) -> bool:
        """Returns whether the model can be served. If not, the client fails with the reason."""
        try:
            await self._frontend.start()
        except (ValueError, OSError, ApiError) as error:
            self.client.fail(" ".join(str(error).split()))
            return False
        _freeze_heap()
        seconds = time.monotonic() - self._started
        name = self._config.model_names[0]
        self._print(f"Serving {name} at {self._where()} after {seconds:.1f} s{self._replicas_so_far()}")
        return True

    def _explain_death(self, *, served: bool) -> int:
        """Says why no engine is left, unless the engine has said so itself; returns the exit code."""
        if served:
            _log.error("the engine has stopped: %s", self.client.dead)
            return BROKE
        if not self.client.explained:
            self._print(f"error: {self.client.dead}")
        return CANNOT_START

    def _replicas_so_far(self) -> str:
        """The part of the start-up line that says how many of several replicas are ready; later ones join."""
        size = self._config.data_parallel_size
        working = sum(one.works for one in self.client.replicas)
        return f", with {working} of {size} replicas" if working < size else ""

    async def _drain(self) -> None:
        """Waits for running requests, until the time for it is over or a second signal comes."""
        self._frontend.begin_drain()
        if self._frontend.live:
            _log.info("stopping: %d running requests may finish", self._frontend.live)
        await _first_of(self._frontend.drained(), self._force.wait(), seconds=self._config.shutdown_timeout)
        if self._frontend.live:
            _log.warning("stopping: %d running requests are cut off", self._frontend.live)

    async def _leave(self, http: asyncio.Task[None]) -> None:
        """Ends running requests with an error, so that no incomplete answer looks complete, then HTTP."""
        self.client.fail("the server is shutting down")
        await _first_of(self._frontend.drained(), self._force.wait(), seconds=FLUSH_SECONDS)
        self._http.should_exit = True
        await http
        self.client.close()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(NO_ENGINE_LEFT, self.client.all_engines_exited)

    def stop(self) -> None:
        """Stops the server after draining; a second call stops it without waiting."""
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    def _show(self, progress: Progress) -> None:
        if self._display is not None:
            self._display.show(progress.phase, progress.fraction, progress.detail)

    def _print(self, line: str) -> None:
        if self._display is not None:
            self._display.done(line)

    def _where(self) -> str:
        config = self._config
        if config.uds is not None:
            return f"unix:{config.uds}"
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        docs = "" if config.disable_fastapi_docs else " (docs: /docs)"
        return f"{'https' if config.ssl_certfile else 'http'}://{host}:{port}{config.root_path}{docs}"

    async def _log_stats(self) -> None:
        if self._config.disable_log_stats:
            return
        before = (0, 0)
        while True:
            await asyncio.sleep(STATS_SECONDS)
            now = self._frontend.metrics.tokens_so_far
            if now != before and self.client.stats is not None:
                stats = self.client.stats
                _log.info(
                    "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, cache %.0f %%",
                    (now[0] - before[0]) / STATS_SECONDS,
                    (now[1] - before[1]) / STATS_SECONDS,
                    stats.running,
                    stats.waiting,
                    100 * stats.kv_usage,
                )
            before = now


def _freeze_heap() -> None:
    """Exempts loaded objects from garbage collection, and makes it rare: requests leave few cycles."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


async def _first_of(*things: Awaitable[object], seconds: float) -> None:
    """Waits until one of these is done, or for `seconds`."""
    tasks = [asyncio.ensure_future(thing) for thing in things]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _uvicorn_config(config: ServerConfig, frontend: Frontend) -> uvicorn.Config:
    if not config.disable_uvicorn_access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return uvicorn.Config(
        create_app(frontend),
        loop="none",  # it runs in ours
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
        root_path=config.root_path,
        backlog=2048,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.ssl_ca_certs else ssl.CERT_NONE,
    )


if __name__ == "__main__":
    runpy.run_module("server.main", run_name="__main__")  # users of vLLM start such a module: it is `serve`
