"""Holds the parts together: one engine, one API server here or several in processes of their own.

Whatever ends first, the rest ends in order: the API servers, then the engine.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

import msgspec
import uvloop

from engine_core.launch import EngineHandle
from server.api_server import BROKE, CANNOT_START, LAST_WORDS_SECONDS, STOPPED, ApiServer
from server.config import ServerConfig
from server.process import ApiProcess
from server.progress import ProgressDisplay
from worker import child

PATIENCE = 10.0
"""Seconds beyond its own time-outs after which a process that does not leave is ended."""

_log = logging.getLogger(__name__)


def run(config: ServerConfig, listener: socket.socket, engine: EngineHandle, started: float) -> int:
    """Serves until the end; returns the exit code, 0 only if the end was asked for."""
    serving = _serve_here if config.api_server_count == 1 else _serve_in_processes
    return uvloop.run(serving(config, listener, engine, started))


async def _serve_here(
    config: ServerConfig, listener: socket.socket, engine: EngineHandle, started: float
) -> int:
    server = ApiServer(config, listener, engine.addresses[0], started=started, display=ProgressDisplay())
    watch = asyncio.create_task(_watch(engine, server))
    code = await server.run()
    watch.cancel()
    return await _engine_code(engine, code)


async def _watch(engine: EngineHandle, server: ApiServer) -> None:
    """The line to the engine tells of its end too, but not before it is up."""
    code = await engine.exited()
    server.client.fail(f"the engine process has ended (exit code {code})")


async def _engine_code(engine: EngineHandle, code: int) -> int:
    """An engine that could not start has said so with a code of its own."""
    if code == STOPPED:
        return STOPPED
    ended = await asyncio.to_thread(engine.stop, LAST_WORDS_SECONDS)
    return CANNOT_START if CANNOT_START in (code, ended) else BROKE


async def _serve_in_processes(
    config: ServerConfig, listener: socket.socket, engine: EngineHandle, started: float
) -> int:
    shared = engine.run_folder / "metrics"
    shared.mkdir(mode=0o700)
    servers = [
        _start(ApiProcess(config, address, i, listener.fileno(), str(shared), started))
        for i, address in enumerate(engine.addresses)
    ]
    listener.close()
    stop = asyncio.Event()
    _forward_signals(servers, stop)
    ends = [asyncio.create_task(_ended(server)) for server in servers]
    watched = [*ends, asyncio.create_task(engine.exited()), asyncio.create_task(stop.wait())]
    await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    code = STOPPED if stop.is_set() else BROKE
    if engine.exit_code == CANNOT_START:
        code = CANNOT_START
    elif code == BROKE:
        _log.error("a process has ended unasked: stopping the others")
    for server in servers:
        if not stop.is_set() and server.exit_code is None and engine.exit_code is None:
            server.terminate()
    await asyncio.wait(ends, timeout=config.shutdown_timeout + PATIENCE)
    for server in servers:
        server.stop(seconds=0)
    for task in watched:
        task.cancel()
    return code


def _start(process: ApiProcess) -> child.Child:
    payload = msgspec.msgpack.encode(process)
    return child.start(f"api {process.index}", "server.process", payload, inherit=[process.listener])


def _forward_signals(servers: list[child.Child], stop: asyncio.Event) -> None:
    """Each signal reaches the API servers as it is: the first drains them, the second ends them."""

    def forward() -> None:
        stop.set()
        for server in servers:
            if server.exit_code is None:
                server.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, forward)


async def _ended(process: child.Child) -> None:
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(process.sentinel, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process.sentinel)
