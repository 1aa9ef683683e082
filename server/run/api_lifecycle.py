"""The life of one API process: follow the engine's start, listen, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import runpy
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_core.client.client import EngineClient
from engine_core.engine_stats import GuessTotals
from engine_core.protocol import Progress
from server.errors import ApiError
from server.frontend.adapters import open_adapters
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels
from server.frontend.model_memory import open_memory
from server.helpers.memory import bound_free_memory
from server.http.connection.sockets import set_options
from server.metrics.server_metrics import Metrics
from server.metrics.stat_loggers import StatLoggers, find_makers
from server.options.model_list import ModelEntry
from server.run import api_children as messages
from server.run.api_children import NOTHING_LEFT, ApiConfig, Message
from server.run.http_server import FLUSH_SECONDS, HttpServer
from server.run.loop_watch import LoopWatch
from server.terminal.progress_bar import ProgressDisplay
from worker import logs
from worker.child import BROKE, CANNOT_START, STOPPED
from worker.host.progress_page import ProgressWriter

STATS_SECONDS = 10.0
BRIDGE_SECONDS = 5.0
"""Seconds for which a process in another one's place does not listen while it cannot serve yet. Clients that
connect meanwhile wait, instead of being refused because this process has just begun."""
SIBLING_SECONDS = 30.0
"""The same where there are other API processes, which answer meanwhile unless they have ended too."""
_LATE = (
    "engine {} of other machines: nothing was heard of the start for {:g} s (--engine-ready-timeout); start "
    "it there with --headless and the same options and cluster key, or look there why it does not come up"
)

_log = logging.getLogger(__name__)


class ApiServer:
    def __init__(self, process: ApiConfig) -> None:
        """Call this in the server's event loop."""
        config = process.config
        shared_metrics = None if process.shared_metrics is None else Path(process.shared_metrics)
        self._config = config
        self._process = process
        self._heard = time.monotonic()
        """When an engine last told how its start goes on."""
        self._listener = socket.socket(fileno=process.listener)
        # One of several processes shows how the start goes on, and it does so once.
        self._display = ProgressDisplay(silent=process.index != 0 or not process.first)
        if process.models:
            self.client = self._frontend = self._many = self._open_models(process.models)
        else:
            self._many = None
            self.client = self._open_client()
            metrics = Metrics(config.model_names[0], shared_metrics, config.replicas.first)
            self._frontend = Frontend(config, self.client, metrics)
        set_options(self._listener)
        self._http = HttpServer(config, self._frontend, Path(process.work_folder))
        self._watch = LoopWatch(
            ProgressWriter(process.progress_page),
            self._frontend.metrics.loop_lag.observe,
            lambda: self._frontend.live > 0,
            closely=config.log.debug_event_loop,
        )
        self._stat_loggers = self._make_stat_loggers()
        self._served = asyncio.Event()
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    def _open_client(self) -> EngineClient:
        config, process = self._config, self._process
        return EngineClient(
            process.address,
            config.replicas,
            server=process.index,
            servers=config.api_server_count,
            restarts=True,
            restart_wait=config.restart_wait,
            on_progress=self._show_progress,
        )

    def _show_progress(self, progress: Progress) -> None:
        self._heard = time.monotonic()
        self._display.show(progress.phase, progress.fraction, progress.detail)

    def _make_stat_loggers(self) -> StatLoggers | None:
        """Make those that the operator has named. Raises ValueError if one cannot be used."""
        makers = find_makers(self._config.plugins.stat_loggers)
        if not (makers and isinstance(self.client, EngineClient)):
            return None
        try:
            return StatLoggers(makers, self._config, self.client, self._frontend.metrics)
        except Exception as error:
            raise ValueError(f"--stat-loggers: {type(error).__name__}: {error}") from error

    def _open_models(self, models: Sequence[ModelEntry]) -> ManyModels:
        bound_free_memory()  # tokenizers come and go
        report = lambda order, *numbers: self._report(" ".join(map(str, (order, *numbers))))  # noqa: E731
        return ManyModels(self._config, models, open_memory(self._config), report)

    async def run(self) -> int:
        """Serves until it is told to stop; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        start = asyncio.create_task(self._follow_start())
        stats = asyncio.create_task(self._log_stats())
        keys = asyncio.create_task(self._frontend.access.follow())
        waiting = asyncio.create_task(self._do_waiting_work(start))
        late = asyncio.create_task(self._expect_engines())
        loggers = self._stat_loggers
        told = [] if loggers is None else [asyncio.create_task(loggers.follow())]
        await self._before_listening(start)
        if self._stop.is_set():
            return STOPPED
        http = asyncio.create_task(self._http.serve([self._listener]))
        try:
            code = await self._serve(http, start)
        finally:
            for task in (start, stats, keys, waiting, late, *told):
                task.cancel()
        self._watch.stop()
        self._display.done()
        await self._leave(http)
        return code

    def handle(self, message: Message) -> None:
        """Act on a message of the supervisor."""
        client = self._client_of(message)
        match message:
            case messages.ModelStarted(model, address, pids) if self._many is not None:
                self._many.engines_started(model, address, pids)
            case messages.ModelsChanged(models) if self._many is not None:
                self._many.use(models)
            case messages.ModelEnded(model, reason) if self._many is not None:
                self._many.engines_ended(model, reason)
            case messages.EngineExited(number, code, at) if client is not None:
                client.engine_exited(number, code, at)
            case messages.EngineGivenUp(number, reason, explained) if client is not None:
                client.engine_given_up(number, reason, explained=explained)
            case messages.EngineStalled(number, stalled) if client is not None:
                client.engine_stalled(number, stalled)
            case messages.Served():
                self._served.set()
            case messages.Leaving():
                self._frontend.begin_drain(refuse=False)
            case messages.CutOff():
                self._force.set()
            case messages.Reload():
                self.reload()
            case _:
                pass  # of an engine that is gone

    def _client_of(self, message: Message) -> EngineClient | None:
        """The client of the engine that a message is on."""
        if isinstance(self.client, EngineClient):
            return self.client
        return self.client.client_of(message.model) if isinstance(message, messages.OfModel) else None

    def _report(self, line: str) -> None:
        os.write(self._process.reports, f"{line}\n".encode())

    def reload(self) -> None:
        """Reads files again that may have been replaced, because the operator has sent SIGHUP."""
        self._http.reload_certificate()
        self._frontend.access.reload()

    async def _before_listening(self, start: asyncio.Task[bool]) -> None:
        """Wait while others answer. A client that /ready told to go ahead must not meet a process that loads:
        one process tells how the start goes on, and all others listen when they, and that one, can serve.
        """
        if not self._process.first:
            seconds = BRIDGE_SECONDS if self._config.api_server_count == 1 else SIBLING_SECONDS
            await _first_of(self._stop, self.client.died, start, seconds=seconds)
        elif self._process.index != 0:
            await _first_of(self._stop, self.client.died, start)
            await _first_of(self._stop, self.client.died, self._served)

    async def _serve(self, http: asyncio.Task[None], start: asyncio.Task[bool]) -> int:
        await _first_of(self._stop, self.client.died, start, http)
        served = (start.done() and start.result()) or not self._process.first
        await _first_of(self._stop, self.client.died, http)
        if self.client.died.is_set() and not self._stop.is_set():
            if self.client.broke:
                return BROKE
            self._explain_death(served=served)
            if not served:
                return CANNOT_START
            if self._config.exit_on_failure:
                return NOTHING_LEFT
            await _first_of(self._stop, http)
        if not self._stop.is_set():
            return BROKE  # uvicorn ended by itself, and has logged why
        await self._drain()
        return STOPPED

    async def _follow_start(self) -> bool:
        """Returns whether the model can be served. If not, the client fails with the reason."""
        adapters = self._frontend.adapters if isinstance(self._frontend, Frontend) else None
        try:
            if adapters is not None and self._process.first:
                await adapters.check()  # before minutes have passed in which the model is loaded
            await self._frontend.start()
            if isinstance(self._frontend, Frontend):
                adapters = self._frontend.adapters = open_adapters(self._frontend)
            if adapters is not None:
                await adapters.start(again=not self._process.first)
        except (ValueError, OSError, ApiError) as error:
            self.client.fail(logs.shorten(" ".join(str(error).split())))
            return False
        if self._many is None:
            gc.freeze()  # what is loaded is here to stay, and requests leave few cycles
        gc.set_threshold(10_000, 20, 20)
        self._watch.start()
        if self._process.index == 0:
            self._report(messages.SERVED)
        after = f"{time.monotonic() - self._process.started:.1f} s{self._replicas_so_far()}"
        names = [entry.name for entry in self._process.models] or [self._config.model_names[0]]
        self._display.done(f"Serving {', '.join(names)} at {self._where()} after {after}")
        self._display.silent = True
        return True

    async def _expect_engines(self) -> None:
        """Name the engines of other machines of which nothing is heard for too long. If none serves, and none
        is here for the supervisor to watch, the start is given up."""
        limit, replicas = self._config.engine.engine_ready_timeout, self._config.replicas
        if not (replicas.elsewhere and self._process.first):
            return
        while (left := self._heard + limit - time.monotonic()) > 0:
            await asyncio.sleep(left)
        missing = {*replicas.numbers} - {one.number for one in self.client.replicas if one.ready}
        late = _LATE.format(", ".join(map(str, sorted(missing))), limit)
        if len(missing) < len(replicas.numbers):
            if missing and self._process.index == 0:
                _log.warning("%s; requests are served without it", late)
        elif replicas.by_ray or not replicas.here:
            self.client.fail(late)

    async def _do_waiting_work(self, start: asyncio.Task[bool]) -> None:
        """Does the work of the folder of batches, once the model is served, until requests are refused."""
        runner = self._http.state.runner
        if not await asyncio.shield(start):
            return
        work = asyncio.create_task(runner.run())
        try:
            await _first_of(self._stop, work)
        finally:
            work.cancel()  # lines that are under way are computed again later: nobody waits for them
            await asyncio.wait([work])

    def _explain_death(self, *, served: bool) -> None:
        """Says why no engine is left, unless the engine has said so itself."""
        if served:
            _log.error("no request can be served any more: %s", self.client.dead)
        elif not self.client.explained:
            self._display.done(logs.error_text(str(self.client.dead)))

    def _replicas_so_far(self) -> str:
        """The part of the start-up line that says how many of several replicas are ready; later ones join."""
        size = len(self._config.replicas.numbers) if self._many is None else 0
        working = sum(one.works for one in self.client.replicas)
        return f", with {working} of {size} replicas" if working < size else ""

    async def _drain(self) -> None:
        """Waits for running requests, until the time for it is over or they shall be cut off."""
        self._frontend.begin_drain(refuse=True)
        self._http.stop_listening()  # others accept: the supervisor, if the whole server ends
        if (running := self._frontend.live) and self._config.shutdown_timeout:
            _log.info(
                "stopping: %s may finish for up to %g s; a second Ctrl-C or SIGTERM ends them at once",
                _running(running),
                self._config.shutdown_timeout,
            )
        await _first_of(self._frontend.idle, self._force, seconds=self._config.shutdown_timeout)
        if self._frontend.live:
            _log.warning("stopping: %s ended before completion", _running(self._frontend.live))
        elif running:
            _log.info("stopping: all running requests have finished")

    async def _leave(self, http: asyncio.Task[None]) -> None:
        """Ends running requests with an error, so that no incomplete answer looks complete, then HTTP."""
        self.client.fail("the server is shutting down", "draining")
        await _first_of(self._frontend.idle, seconds=FLUSH_SECONDS)
        self._http.end()
        await http
        self.client.close()

    def _where(self) -> str:
        config = self._config
        if config.uds is not None:
            return f"unix:{config.uds}"
        host, port = self._listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        docs = "" if config.disable_fastapi_docs else " (docs: /docs)"
        scheme = "https" if config.connections.ssl_certfile else "http"
        return f"{scheme}://{host}:{port}{docs}"

    async def _log_stats(self) -> None:
        before, guessed = (0, 0), None
        while True:
            await asyncio.sleep(STATS_SECONDS)
            self._frontend.metrics.count_dropped_lines()
            now = self._frontend.metrics.tokens_so_far
            if now != before and self.client.stats is not None and not self._config.log.disable_log_stats:
                stats = self.client.stats
                _log.info(
                    "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, cache %.0f %%%s",
                    (now[0] - before[0]) / STATS_SECONDS,
                    (now[1] - before[1]) / STATS_SECONDS,
                    stats.running,
                    stats.waiting,
                    100 * stats.kv_usage,
                    _of_guesses(guessed, stats.guesses),
                )
                guessed = stats.guesses
            before = now


def _of_guesses(before: GuessTotals | None, now: GuessTotals | None) -> str:
    """Tell how many proposed tokens were accepted since the last line; a new engine begins at 0."""
    if now is None:
        return ""
    first = GuessTotals(0, 0, []) if before is None or before.drafts > now.drafts else before
    drafts, guessed = now.drafts - first.drafts, now.guessed - first.guessed
    held = now.accepted - first.accepted
    if drafts <= 0 or guessed <= 0:
        return ""
    return f", speculation: {100 * held / guessed:.0f} % accepted, {1 + held / drafts:.2f} tokens per step"


def _running(count: int) -> str:
    return "1 running request" if count == 1 else f"{count} running requests"


async def _first_of(*ends: asyncio.Event | asyncio.Task[Any], seconds: float | None = None) -> None:
    """Waits until one of these has come, or for `seconds` at most."""
    waits = [asyncio.create_task(end.wait()) for end in ends if isinstance(end, asyncio.Event)]
    tasks = [end for end in ends if isinstance(end, asyncio.Task)]
    try:
        await asyncio.wait([*waits, *tasks], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


if __name__ == "__main__":
    runpy.run_module("server.main", run_name="__main__")  # users of vLLM start such a module: it is `serve`
