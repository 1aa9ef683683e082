"""One of several API processes, `python -m server.run.process FD`, on a shared listening socket."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from engine_core.config import Address
from server.options.table import ServerConfig, share_metrics
from worker import child, logs


class ApiProcess(msgspec.Struct, frozen=True):
    """The message from the parent process with which an API process starts."""

    config: ServerConfig
    address: Address
    index: int
    listener: int
    """The inherited file descriptor of the shared listening socket."""
    shared_metrics: str
    started: float
    """Start of the command on the monotonic clock, which all processes share."""


def main() -> int:
    process = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=ApiProcess)
    logs.setup(f"server {process.index}", process.config.uvicorn_log_level)
    share_metrics(Path(process.shared_metrics))
    return uvloop.run(_serve(process))


async def _serve(process: ApiProcess) -> int:
    from server.run.api_server import (
        ApiServer,  # after share_metrics, because prometheus_client reads the variable when imported
    )
    from server.run.progress import ProgressDisplay

    server = ApiServer(
        process.config,
        socket.socket(fileno=process.listener),
        process.address,
        index=process.index,
        started=process.started,
        display=ProgressDisplay() if process.index == 0 else None,
        shared_metrics=Path(process.shared_metrics),
    )
    return await server.run()


if __name__ == "__main__":
    sys.exit(main())
