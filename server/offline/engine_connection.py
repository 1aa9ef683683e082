"""The connection of an `AsyncLLM` to its engines, which belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from engine_core.client.client import EngineClient
from engine_core.engine_processes import EngineProcesses
from engine_core.restarts import keep_engines
from server.errors import Unavailable
from server.frontend.adapters import ServedAdapters
from server.frontend.frontend import Frontend
from server.metrics.server_metrics import Metrics
from server.offline.stat_loggers import MakeStatLogger, StatLoggers
from server.options.server_config import ServerConfig
from server.run.progress_bar import ProgressDisplay
from worker import logs

UNLIMITED = 1 << 62
"""The default bound on waiting requests: a program needs no protection from its own requests."""

SHUT_DOWN = "The engine has been shut down."


class Connection:
    """Connects one event loop to the engines. Create it in that loop."""

    def __init__(
        self, config: ServerConfig, engines: EngineProcesses, stat_loggers: Sequence[MakeStatLogger]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._display = ProgressDisplay()
        self.client = EngineClient(
            engines.addresses[0],
            config.replicas,
            restarts=True,
            restart_wait=config.restart_wait,
            on_progress=lambda now: self._display.show(now.phase, now.fraction, now.detail),
        )
        self._engines = engines
        self.frontend = Frontend(_without_bound(config), self.client, Metrics(config.model_names[0]))
        if config.engine.worker.lora.enable_lora:
            self.frontend.adapters = ServedAdapters(self.frontend)
        self._watch = self._loop.create_task(keep_engines(engines, self.client))
        self._start = self._loop.create_task(self._prepare())
        loggers = StatLoggers(stat_loggers, config, self.client, self.frontend.metrics)
        self._logging = self._loop.create_task(loggers.follow())

    async def ready(self) -> Frontend:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this AsyncLLM is used in another event loop already: one loop, one AsyncLLM")
        try:
            await asyncio.shield(self._start)
        except asyncio.CancelledError:
            if self._start.cancelled() and not _is_cancelled():
                raise Unavailable(SHUT_DOWN) from None  # by shutdown() while the model was loading
            raise
        return self.frontend

    def close(self) -> None:
        """May be called from any thread, and after the loop."""
        if self._loop.is_running() and asyncio._get_running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._close)
        else:
            self._close()

    def _close(self) -> None:
        if not self._loop.is_closed():
            self._watch.cancel()
            self._logging.cancel()
            self._start.cancel()
        self.frontend.helpers.close()
        self.client.fail(SHUT_DOWN)
        self.client.close()

    async def _prepare(self) -> None:
        try:
            await self.frontend.start()
            self._engines.worked = True
        except (ValueError, OSError) as error:
            self.client.fail(logs.one_line(error))
            raise
        finally:
            self._display.done()


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task that runs now."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _without_bound(config: ServerConfig) -> ServerConfig:
    names = ("max_num_queued_reqs", "max_num_queued_tokens")
    unbound = {name: UNLIMITED for name in names if getattr(config.engine, name) is None}
    engine = msgspec.structs.replace(config.engine, **unbound)
    return msgspec.structs.replace(config, engine=engine)
