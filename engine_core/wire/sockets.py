"""Keys and events of ZMQ sockets, for connections that may lead to other machines.

Keys are CURVE's, made from the secret that all machines of a cluster share. CURVE encrypts both ways. It
never sends the listener's public key, and nobody can greet a listener without it: since ours comes from the
secret, a stranger's first frame is refused, and no ZAP handler has to look at clients. Recorded traffic could
be used to test guesses of the secret, which is why short ones are refused.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from engine_core.config import check_cluster_key

CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
DISCONNECTED = zmq.EVENT_DISCONNECTED
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""A failed handshake. DISCONNECTED follows for the same connection."""


class KeyPair(msgspec.Struct, frozen=True):
    public: bytes
    secret: bytes


class ClusterKeys(msgspec.Struct, frozen=True):
    """The key pairs of both sides of every connection: all machines have the same two."""

    listener: KeyPair
    caller: KeyPair

    @classmethod
    def derive(cls, secret: str) -> ClusterKeys:
        check_cluster_key(secret)
        return cls(listener=_pair("listener", secret), caller=_pair("caller", secret))

    def guard(self, sock: zmq.Socket[Any]) -> None:
        """Refuse those who do not present these keys. Call it before bind."""
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.listener.secret)

    def present(self, sock: zmq.Socket[Any]) -> None:
        """Connect only to a listener that has these keys. Call it before connect."""
        sock.setsockopt(zmq.CURVE_SERVERKEY, self.listener.public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, self.caller.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.caller.secret)


def _pair(role: str, secret: str) -> KeyPair:
    # Any 32 bytes are a secret key; slow hashing would not help, as the secret is to be random.
    private = z85.encode(hashlib.sha256(f"facet {role} key\0{secret}".encode()).digest())
    return KeyPair(public=zmq.curve_public(private), secret=private)


def socket_events(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """All events that have come, each with the number of its connection; never waits."""
    while True:
        try:
            head, _endpoint = monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield struct.unpack_from("=HI", head)


def stop_monitor(sock: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    sock.disable_monitor()
    monitor.close(linger=0)
