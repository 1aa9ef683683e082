"""Connects some processes of one machine, each with each, through Unix sockets.

Their paths lie in a folder of the user who runs the processes, so nobody else can connect, as anybody could
to a TCP port of loopback. The end of a process is noticed at once by all others. This module imports no
torch.
"""

from __future__ import annotations

import os
import socket
import time

_NUMBER_BYTES = 4
_RETRY = 0.005
"""Seconds after which a process looks again whether another one listens."""
_BUFFER = 1 << 22
"""Bytes that should fit on their way from one process to another; the system may grant fewer."""


class RankLostError(RuntimeError):
    """Another rank has ended, or has not answered in time."""


def connect_all(prefix: str, rank: int, size: int, timeout: float) -> dict[int, socket.socket]:
    """Connect to all ranks, which have sockets at `prefix` and come within `timeout` seconds; none blocks."""
    until = time.monotonic() + timeout
    own = f"{prefix}-{rank}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(own)
        listener.listen(size)
        peers = {other: _call(f"{prefix}-{other}", rank, until) for other in range(rank)}
        while len(peers) < size - 1:
            listener.settimeout(max(0.001, until - time.monotonic()))
            try:
                peer, _ = listener.accept()
            except TimeoutError as error:
                missing = size - 1 - len(peers)
                raise RankLostError(f"{missing} ranks have not come in {timeout:g} s") from error
            peer.settimeout(timeout)
            peers[int.from_bytes(peer.recv(_NUMBER_BYTES, socket.MSG_WAITALL), "little")] = peer
    os.unlink(own)
    for peer in peers.values():
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        peer.setblocking(False)
    return peers


def _call(path: str, rank: int, until: float) -> socket.socket:
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.connect(path)
        except (FileNotFoundError, ConnectionRefusedError) as error:  # it does not listen yet
            peer.close()
            if time.monotonic() > until:
                raise RankLostError(f"the rank that listens at {path} has not come") from error
            time.sleep(_RETRY)
        else:
            peer.sendall(rank.to_bytes(_NUMBER_BYTES, "little"))
            return peer
