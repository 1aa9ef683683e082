"""Stat loggers: objects of a program or an operator that are told how engines do, by methods of vLLM's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from engine_core.client.client import EngineClient
from engine_core.engine_stats import Stats
from models.plugins import load_plugin
from server.metrics.server_metrics import Metrics
from server.options.server_flags import ServerConfig

LOOK_SECONDS, LOG_SECONDS = 1.0, 10.0
"""Seconds from one record to the next, and from one line of the log to the next."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IterationStats:
    """The work of all engines together since the last record."""

    num_prompt_tokens: int
    num_generation_tokens: int
    iteration_timestamp: float


class StatLoggerBase:
    """The base of a program's class, which may also have these methods without it."""

    def __init__(self, vllm_config: ServerConfig, engine_index: int = 0) -> None: ...

    def log_engine_initialized(self) -> None:
        """Called once the engine can take requests."""

    def record(
        self, scheduler_stats: Stats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        """Called every second with what the engine has told of itself last."""

    def log(self) -> None:
        """Called every ten seconds."""


MakeStatLogger = Callable[[ServerConfig, int], StatLoggerBase]
"""The type of a class of stat loggers, or of a function that makes them."""


def find_makers(names: Sequence[str]) -> list[MakeStatLogger]:
    """Import the stat loggers that an operator names: installed ones, or classes. Raises ValueError."""
    installed = (
        {entry.name: entry.value for entry in entry_points(group="facet.stat_loggers")} if names else {}
    )
    return [load_plugin("--stat-loggers", installed.get(name, name)) for name in names]


class StatLoggers:
    """Tells each engine's loggers. One that raises an error is told no more."""

    def __init__(
        self, makers: Sequence[MakeStatLogger], config: ServerConfig, client: EngineClient, metrics: Metrics
    ) -> None:
        self._client, self._metrics = client, metrics
        replicas = range(config.data_parallel_size)
        self._loggers = [(index, make(config, index)) for index in replicas for make in makers]
        self._begun: set[int] = set()

    async def follow(self) -> None:
        """Tell them until this is cancelled."""
        before, logged = self._metrics.tokens_so_far, time.monotonic()
        while self._loggers:
            await asyncio.sleep(LOOK_SECONDS)
            (prompt, output), now = self._metrics.tokens_so_far, time.monotonic()
            done = IterationStats(prompt - before[0], output - before[1], now)
            before, is_due = (prompt, output), now - logged >= LOG_SECONDS
            logged = now if is_due else logged
            working = {one.number: one.stats for one in self._client.replicas if one.works}
            begun, self._begun = self._begun, self._begun | working.keys()
            for entry in list(self._loggers):
                index, logger = entry
                if index not in working:
                    continue
                try:
                    if index not in begun:
                        logger.log_engine_initialized()
                    logger.record(working[index], done, engine_idx=index)
                    if is_due:
                        logger.log()
                except Exception:
                    _log.exception("a stat logger failed, and is told no more: %s", type(logger).__name__)
                    self._loggers.remove(entry)
