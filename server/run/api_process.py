"""An API process on the socket that the supervisor holds: `python -m server.run.api_process FD`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import msgspec
import uvloop

from server.options.server_options import share_metrics
from server.run.supervisor_messages import ApiConfig, Message
from worker import child, logs


class Messages:
    """The supervisor's messages, which a thread receives and the event loop handles."""

    def __init__(self) -> None:
        self._waiting = SimpleQueue[bytes]()
        self._wake: Callable[[], object] = lambda: None
        self._decoder = msgspec.msgpack.Decoder(Message)

    def put(self, message: bytes) -> None:
        self._waiting.put(message)
        self._wake()

    def follow(self, handle: Callable[[Message], None]) -> None:
        """Let the running loop handle all messages: those that have come, and those that will."""

        def handle_all() -> None:
            while not self._waiting.empty():
                handle(self._decoder.decode(self._waiting.get()))

        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: the process ends, whatever the message says
                loop.call_soon_threadsafe(handle_all)

        self._wake = wake
        handle_all()


def main() -> int:
    messages = Messages()
    process = msgspec.msgpack.decode(child.adopt(int(sys.argv[1]), messages.put), type=ApiConfig)
    alone = process.shared_metrics is None
    logs.setup("server" if alone else f"server {process.index}", process.config.log.style)
    if process.shared_metrics is not None:
        share_metrics(Path(process.shared_metrics))
    return uvloop.run(_serve(process, messages))


async def _serve(process: ApiConfig, messages: Messages) -> int:
    # After share_metrics, because prometheus_client reads the variable when it is imported.
    from server.run.api_server import ApiServer

    server = ApiServer(process)
    messages.follow(server.handle)
    return await server.run()


if __name__ == "__main__":
    sys.exit(main())
