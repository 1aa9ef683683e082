"""TCP ports of the loopback addresses that nobody uses."""

import random
import socket
from contextlib import ExitStack

_TRIES = 100
_RANGE = 10_000, 32_000
"""Below the ports that Linux gives to connections: none takes a port between its choice and its use."""


def free_ports(count: int = 1, address: str = "127.0.0.1") -> int:
    """The first of so many, one after the other."""
    for _ in range(_TRIES):
        first = random.randrange(*_RANGE)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind((address, port))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {count} free ports in a row")
