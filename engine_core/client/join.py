"""Before a machine starts engines for another's API servers: ask there what they have to know."""

from __future__ import annotations

import logging
from contextlib import suppress

import msgspec
import zmq

from engine_core.config import Address
from engine_core.protocol import PROTOCOL, Join, Welcome
from engine_core.wire import socket_events
from engine_core.wire.transport import present_keys

_PATIENCE_MS = 30_000
"""Between lines in the log while nobody answers, the first of which comes at once."""

_log = logging.getLogger(__name__)


class Refused(ValueError):
    pass


def join(door: Address) -> Welcome:
    """Waits for an API server to be there, however long that takes. Raises Refused if it wants none of us."""
    with zmq.Context() as context:
        sock = context.socket(zmq.DEALER)
        present_keys(sock, door)
        refusals = sock.get_monitor_socket(socket_events.REFUSED)
        try:
            sock.connect(door.requests)
            sock.send(msgspec.msgpack.encode(Join(PROTOCOL)))
            return _answer(sock, refusals, door)
        finally:
            socket_events.stop(sock, refusals)
            sock.close(linger=0)


def _answer(sock: zmq.Socket[bytes], refusals: zmq.Socket[bytes], door: Address) -> Welcome:
    poller = zmq.Poller()
    poller.register(sock, zmq.POLLIN)
    poller.register(refusals, zmq.POLLIN)
    while True:
        _log.info("waiting for an API server at %s", door.requests)
        ready = dict(poller.poll(_PATIENCE_MS))
        if refusals in ready:
            raise Refused(
                f"{door.requests} does not know this key: set the same FACET_CLUSTER_KEY on all machines"
            )
        if sock in ready:
            return _read(sock.recv())


def _read(frame: bytes) -> Welcome:
    with suppress(msgspec.DecodeError):
        welcome = msgspec.msgpack.decode(frame, type=Welcome)
        if welcome.protocol == PROTOCOL:
            return welcome
    raise Refused("the API server is of another version: install the same one on all machines")
