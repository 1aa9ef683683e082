"""TCP ports of the loopback addresses that nobody uses."""

from __future__ import annotations

import socket
from contextlib import ExitStack

_TRIES = 100


def free_ports(count: int, address: str = "127.0.0.1") -> int:
    """The first of so many, one after the other."""
    for _ in range(_TRIES):
        with ExitStack() as stack:
            socks = [stack.enter_context(socket.socket()) for _ in range(count)]
            socks[0].bind((address, 0))
            first = socks[0].getsockname()[1]
            try:
                for offset, sock in enumerate(socks[1:], 1):
                    sock.bind((address, first + offset))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {count} free ports in a row")
