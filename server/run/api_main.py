"""An API process on the socket that the supervisor holds: `python -m server.run.api_main FD`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import uvloop

from server.metrics.shared_files import keep_files_allocated, make_files
from server.options.parse_server_options import share_metrics
from server.run.api_children import ApiConfig, Message
from worker import child, logs

_log = logging.getLogger(__name__)


def in_loop(handle: Callable[[Message], None]) -> Callable[[bytes], None]:
    """Makes a function for other threads, which has the running loop handle each message in its turn."""
    loop, decode = asyncio.get_running_loop(), msgspec.msgpack.Decoder(Message).decode

    def receive(message: bytes) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends, whatever the message says
            loop.call_soon_threadsafe(lambda: handle(decode(message)))

    return receive


def _share_metrics(folder: Path) -> None:
    """Have the metrics of this process shown by all, if there is room for them."""
    if reason := make_files(folder):
        _log.error(
            "what this process counts is not in /metrics: files in %s cannot be made: %s", folder, reason
        )
        return
    share_metrics(folder)
    keep_files_allocated()


async def _serve(descriptor: int) -> int:
    # Messages are handled when this waits for the first time, and the server is there.
    payload = child.adopt(descriptor, in_loop(lambda message: server.handle(message)))
    process = msgspec.msgpack.decode(payload, type=ApiConfig)
    alone = process.shared_metrics is None
    logs.setup("server" if alone else f"server {process.index}", process.config.log.style)
    if process.shared_metrics is not None:
        _share_metrics(Path(process.shared_metrics))
    # After share_metrics, because prometheus_client reads the variable when it is imported.
    from server.run.api_lifecycle import ApiServer

    try:
        server = ApiServer(process)
    except ValueError as error:  # middleware of the operator's cannot be used
        logs.print_error(logs.one_line(error))
        return child.CANNOT_START
    return await server.run()


if __name__ == "__main__":
    sys.exit(uvloop.run(_serve(int(sys.argv[1]))))
