"""The connection of an `AsyncLLM` to its engines, in one event loop, and the frontends of programs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from engine_core.client.client import EngineClient
from engine_core.engine_children import EngineProcesses
from engine_core.restarts import keep_engines
from server.errors import Unavailable
from server.frontend.adapters import ServedAdapters
from server.frontend.frontend import Frontend
from server.metrics.server_metrics import Metrics
from server.metrics.stat_loggers import MakeStatLogger, StatLoggers
from server.options.media_options import MEDIA_KINDS, MediaOptions
from server.options.server_flags import ServerConfig
from server.request_limits import NO_LIMITS
from server.terminal.progress_bar import ProgressDisplay
from worker import logs

UNLIMITED = 1 << 62
"""The default bound on waiting requests: a program needs no protection from its own requests."""
_MANY_ITEMS, _MANY_MB, _LONG_SECONDS = 1 << 20, 1 << 20, 3600.0

SHUT_DOWN = "The engine has been shut down."


def open_frontend(config: ServerConfig, client: EngineClient) -> Frontend:
    """The frontend of a program, whose requests are the operator's own."""
    frontend = Frontend(_for_programs(config), client, Metrics(config.model_names[0]))
    frontend.limits = NO_LIMITS
    if config.engine.worker.lora.enable_lora:
        frontend.adapters = ServedAdapters(frontend)
    return frontend


def end_frontend(frontend: Frontend, reason: str) -> None:
    """Ends all requests, and the processes that a frontend has started, also where its loop runs no more."""
    frontend.helpers.close()
    frontend.client.fail(reason)
    frontend.client.close()


def _for_programs(config: ServerConfig) -> ServerConfig:
    """The configuration with trust in requests, and without those bounds that were not asked for."""
    names = ("max_num_queued_reqs", "max_num_queued_tokens")
    unbound = {name: UNLIMITED for name in names if getattr(config.engine, name) is None}
    usual, given = MediaOptions(), config.media
    limits = {**dict.fromkeys(MEDIA_KINDS, _MANY_ITEMS), **given.limit_mm_per_prompt}
    changes = {"max_media_mb": _MANY_MB, "media_seconds": _LONG_SECONDS}
    changed = {name: value for name, value in changes.items() if getattr(given, name) == getattr(usual, name)}
    media = replace(given, limit_mm_per_prompt=limits, trust_request_mm_kwargs=True, **changed)
    engine = replace(config.engine, **unbound)
    return replace(config, engine=engine, media=media, trust_request_chat_template=True)


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
        self.frontend = open_frontend(config, self.client)
        loggers = StatLoggers(stat_loggers, config, self.client, self.frontend.metrics)
        self._start = self._loop.create_task(self._prepare())
        self._tasks = [
            self._start,
            self._loop.create_task(keep_engines(engines, self.client)),
            self._loop.create_task(loggers.follow()),
        ]

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
            for task in self._tasks:
                task.cancel()
        end_frontend(self.frontend, SHUT_DOWN)

    async def _prepare(self) -> None:
        try:
            await self.frontend.start(reads_bodies=False)
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
