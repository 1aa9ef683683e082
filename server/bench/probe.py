"""Asks a server that may not be up yet for an answer."""

from __future__ import annotations

import http.client
import json
import socket

_PATIENCE = 600.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def opens(port: int, method: str, path: str, body: object = None) -> bool:
    """Whether the server answers this request with status 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
