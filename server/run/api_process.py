"""An API process on the socket that the supervisor holds: `python -m server.run.api_process FD`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import uvloop

from server.options.server_options import share_metrics
from server.run.api_processes import ApiConfig, Message
from worker import child, logs


def in_loop(handle: Callable[[Message], None]) -> Callable[[bytes], None]:
    """Makes a function for other threads, which has the running loop handle each message in its turn."""
    loop, decode = asyncio.get_running_loop(), msgspec.msgpack.Decoder(Message).decode

    def receive(message: bytes) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends, whatever the message says
            loop.call_soon_threadsafe(lambda: handle(decode(message)))

    return receive


async def _serve(descriptor: int) -> int:
    # Messages are handled when this waits for the first time, and the server is there.
    payload = child.adopt(descriptor, in_loop(lambda message: server.handle(message)))
    process = msgspec.msgpack.decode(payload, type=ApiConfig)
    alone = process.shared_metrics is None
    logs.setup("server" if alone else f"server {process.index}", process.config.log.style)
    if process.shared_metrics is not None:
        share_metrics(Path(process.shared_metrics))
    # After share_metrics, because prometheus_client reads the variable when it is imported.
    from server.run.api_server import ApiServer

    try:
        server = ApiServer(process)
    except ValueError as error:  # middleware of the operator's cannot be used
        print(f"error: {logs.one_line(error)}", file=sys.stderr)
        return child.CANNOT_START
    return await server.run()


if __name__ == "__main__":
    sys.exit(uvloop.run(_serve(int(sys.argv[1]))))
