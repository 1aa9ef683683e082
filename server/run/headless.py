"""Runs a machine without an API: replicas for another machine's API, or ranks for another's engine."""

from __future__ import annotations

import asyncio
import logging
import signal

import uvloop

from engine_core.engine_children import EngineProcesses, start_engines
from engine_core.ranks.node_process import run_node
from engine_core.restarts import NoWatcher, keep_engines
from engine_core.wire.headless_join import Refused, join
from server.options.server_flags import ServerConfig
from worker.child import BROKE, CANNOT_START, STOPPED

ENGINE_SECONDS = 3.0
"""Seconds for engines to end, beyond the time that requests may run on."""

_log = logging.getLogger(__name__)


def run(config: ServerConfig) -> int:
    """Returns the exit code, 0 only if the end was asked for. Raises Refused if it may not join."""
    if config.engine.nnodes > 1:
        return run_node(config.engine, config.log.style)
    engines = _start_engines(config)
    try:
        return uvloop.run(_follow(config, engines))
    finally:
        engines.stop(0)


def _start_engines(config: ServerConfig) -> EngineProcesses:
    replicas = config.replicas
    welcome = join(replicas.tcp_address(0))
    if welcome.replicas != replicas.size:
        raise Refused(
            f"the API server at {replicas.address} expects --data-parallel-size {welcome.replicas}, and here "
            f"it is {replicas.size}: give the same on all machines"
        )
    if replicas.first < (taken := welcome.local_replicas):
        raise Refused(
            f"--data-parallel-start-rank {replicas.first}: the first {taken} replicas run beside the API "
            f"server at {replicas.address}; give {taken} or more"
        )
    numbers = ", ".join(map(str, replicas.local))
    _log.info("runs replica %s of %d, for the API at %s", numbers, replicas.size, replicas.address)
    engines = start_engines(
        config.engine,
        replicas,
        addresses=[replicas.tcp_address(server) for server in range(welcome.servers)],
        drain_seconds=config.shutdown_timeout,
        log_level=config.log.style,
        debug_steps=config.log.debug_steps,
    )
    engines.worked = replicas.together  # they end whenever one of another machine does, and come again
    return engines


async def _follow(config: ServerConfig, engines: EngineProcesses) -> int:
    """Runs until a signal comes or no engine is left. A second signal does not wait for running requests."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            engines.terminate()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    ended = asyncio.create_task(keep_engines(engines, NoWatcher()))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    stopped.cancel()
    if not stop.is_set():
        return CANNOT_START if CANNOT_START in [one.exit_code for one in engines.engines] else BROKE
    await asyncio.to_thread(engines.stop, config.shutdown_timeout + ENGINE_SECONDS)
    return STOPPED
