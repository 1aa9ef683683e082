"""The HTTP API over a `FakeFrontend`, served on a port by a thread, for clients that block."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fake_api import make_app
from fake_frontend import FakeFrontend

SECONDS = 60.0


@contextmanager
def served(frontend: FakeFrontend, **options: Any) -> Iterator[str]:
    """Yields the server's URL. `options` are fields of ServerConfig."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(frontend, **options), log_level="critical", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()  # the port is open already, so clients wait until the server accepts
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(SECONDS)
        listener.close()
