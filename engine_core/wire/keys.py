"""Who may join over a network: whoever knows one secret. CURVE keys, made from that secret alone.

CURVE encrypts both ways. It never sends the listener's public key, and nobody can greet a listener without
it: since ours comes from the secret, a stranger's first frame is refused, and no ZAP handler has to look at
clients. What was recorded on the wire could test guesses of the secret, which is why short ones are refused.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from engine_core.wire.secret import check_length


class KeyPair(msgspec.Struct, frozen=True):
    public: bytes
    secret: bytes


class ClusterKeys(msgspec.Struct, frozen=True):
    """Both sides of every connection: all members hold the same two pairs."""

    listener: KeyPair
    caller: KeyPair

    @classmethod
    def derive(cls, secret: str) -> ClusterKeys:
        check_length(secret)
        return cls(listener=_pair("listener", secret), caller=_pair("caller", secret))

    def guard(self, sock: zmq.Socket[Any]) -> None:
        """Before bind: let nobody in who does not present these keys."""
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.listener.secret)

    def present(self, sock: zmq.Socket[Any]) -> None:
        """Before connect: join a listener that guards itself with these keys, and no other."""
        sock.setsockopt(zmq.CURVE_SERVERKEY, self.listener.public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, self.caller.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, self.caller.secret)


def _pair(role: str, secret: str) -> KeyPair:
    # Any 32 bytes are a secret key; slow hashing would not help, as the secret is to be random.
    private = z85.encode(hashlib.sha256(f"facet {role} key\0{secret}".encode()).digest())
    return KeyPair(public=zmq.curve_public(private), secret=private)
