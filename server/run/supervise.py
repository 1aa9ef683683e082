"""Runs the engines, and one API server in this process or several in processes of their own.

One of several engines may end, and is started again. Whatever else ends first, the rest is ended in order:
the API servers, then the engines.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

import msgspec
import uvloop

from engine_core.engine_processes import EngineProcesses, wait_for_end
from server.options.table import ServerConfig
from server.run.api_server import FLUSH_SECONDS, NO_ENGINE_LEFT, ApiServer
from server.run.process import ApiProcess
from server.run.progress import ProgressDisplay
from worker import child
from worker.child import BROKE, CANNOT_START, STOPPED

EXTRA_SECONDS = 10.0
"""Seconds beyond its own time-outs after which a process is killed."""

_log = logging.getLogger(__name__)


def run(config: ServerConfig, listener: socket.socket, engines: EngineProcesses, started: float) -> int:
    """Serves until the end and returns the exit code, 0 only if the end was asked for."""
    serving = _serve_here if config.api_server_count == 1 else _serve_in_processes
    return uvloop.run(serving(config, listener, engines, started))


async def _serve_here(
    config: ServerConfig, listener: socket.socket, engines: EngineProcesses, started: float
) -> int:
    server = ApiServer(config, listener, engines.addresses[0], started=started, display=ProgressDisplay())
    # The connection to an engine also shows its end, but only once there is one.
    watch = asyncio.create_task(engines.supervise(server.client.engine_exited))
    code = await server.run()
    watch.cancel()
    if code == STOPPED:
        return STOPPED
    # An engine that could not start has an exit code that says so.
    codes = await asyncio.to_thread(engines.stop, FLUSH_SECONDS)
    return CANNOT_START if CANNOT_START in (code, *codes) else BROKE


async def _serve_in_processes(
    config: ServerConfig, listener: socket.socket, engines: EngineProcesses, started: float
) -> int:
    shared = engines.run_folder / "metrics"
    shared.mkdir(mode=0o700)
    servers = [
        _start(ApiProcess(config, address, i, listener.fileno(), str(shared), started))
        for i, address in enumerate(engines.addresses)
    ]
    listener.close()
    stop = asyncio.Event()
    _forward_signals(servers, stop)
    ends = [asyncio.create_task(wait_for_end(server)) for server in servers]
    engines_end = asyncio.create_task(_engines_end(config, engines))
    watched = [*ends, engines_end, asyncio.create_task(stop.wait())]
    await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    code = STOPPED if stop.is_set() else BROKE
    if code == BROKE and CANNOT_START in [engine.exit_code for engine in engines.engines]:
        code = CANNOT_START
    elif code == BROKE:
        _log.error("a process has ended unasked: stopping the others")
    for server in servers:
        if not stop.is_set() and server.exit_code is None:
            server.signal(NO_ENGINE_LEFT if engines_end.done() else signal.SIGTERM)
    await asyncio.wait(ends, timeout=config.shutdown_timeout + EXTRA_SECONDS)
    for server in servers:
        server.stop(seconds=0)
    for task in watched:
        task.cancel()
    return code


async def _engines_end(config: ServerConfig, engines: EngineProcesses) -> None:
    """Returns when no engine is left. API servers find out themselves what that means for requests."""
    await engines.supervise(_log_silent_end)
    if config.replicas.elsewhere:
        await asyncio.Event().wait()  # only the API servers know how many engines are left there


def _log_silent_end(number: int, code: int) -> None:
    """Logs the exit code of an engine that ended; the API servers see only that a connection ended."""
    if code not in (STOPPED, BROKE, CANNOT_START):
        _log.error("the process of engine %d ended: %s", number, child.describe_exit(code))


def _start(process: ApiProcess) -> child.Child:
    payload = msgspec.msgpack.encode(process)
    return child.start(f"api {process.index}", "server.run.process", payload, inherit=[process.listener])


def _forward_signals(servers: list[child.Child], stop: asyncio.Event) -> None:
    """Passes each signal on to the API servers: the first drains them, the second ends them."""

    def forward() -> None:
        stop.set()
        for server in servers:
            if server.exit_code is None:
                server.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, forward)
