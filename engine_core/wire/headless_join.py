"""The question of a headless machine to an API server, how many servers and replicas there are."""

from __future__ import annotations

import logging
from contextlib import suppress

import msgspec
import zmq

from engine_core.config import Address
from engine_core.protocol import PROTOCOL, Join, Welcome
from engine_core.wire.sockets import REFUSED, stop_monitor
from engine_core.wire.transport import secure

_LOG_MS = 30_000
"""The time between log lines while nobody answers. The first line comes at once."""

_log = logging.getLogger(__name__)


class Refused(ValueError):
    """The API server and this machine cannot work together; the message says why."""


def join(address: Address) -> Welcome:
    """Waits until the API server at that address answers, however long that takes. Raises Refused."""
    with zmq.Context() as context:
        sock = context.socket(zmq.DEALER)
        secure(sock, address, listens=False)
        refusals = sock.get_monitor_socket(REFUSED)
        try:
            sock.connect(address.requests)
            sock.send(msgspec.msgpack.encode(Join(PROTOCOL)))
            return _wait(sock, refusals, address.requests)
        finally:
            stop_monitor(sock, refusals)
            sock.close(linger=0)


def _wait(sock: zmq.Socket[bytes], refusals: zmq.Socket[bytes], where: str) -> Welcome:
    poller = zmq.Poller()
    poller.register(sock, zmq.POLLIN)
    poller.register(refusals, zmq.POLLIN)
    ready: dict[object, int] = {}
    while not ready:
        _log.info("waiting for an API server at %s", where)
        ready = dict(poller.poll(_LOG_MS))
    if refusals in ready:
        raise Refused(f"{where} does not know this key: set the same FACET_CLUSTER_KEY on all machines")
    with suppress(msgspec.DecodeError):
        welcome = msgspec.msgpack.decode(sock.recv(), type=Welcome)
        if welcome.protocol == PROTOCOL:
            return welcome
    raise Refused("the API server is of another version: install the same one on all machines")
