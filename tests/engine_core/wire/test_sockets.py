"""Connections between two sockets: those who know the secret get through, and nobody else."""

from collections.abc import Iterator

import pytest
import zmq

from engine_core.wire.sockets import ClusterKeys

SECRET = "a secret of our own, long enough"
OURS = ClusterKeys.derive(SECRET)
OTHERS = ClusterKeys.derive("another secret, just as long as that")


class Cable:
    """Pairs of sockets on this machine, all closed at the end."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socks: list[zmq.Socket[bytes]] = []
        self.address = ""

    def listener(self, keys: ClusterKeys | None) -> zmq.Socket[bytes]:
        sock = self._socket(zmq.PULL)
        if keys is not None:
            keys.guard(sock)
        self.address = f"tcp://127.0.0.1:{sock.bind_to_random_port('tcp://127.0.0.1')}"
        return sock

    def send(self, keys: ClusterKeys | None, frame: bytes) -> None:
        sock = self._socket(zmq.PUSH)
        if keys is not None:
            keys.present(sock)
        sock.connect(self.address)
        sock.send(frame)

    def close(self) -> None:
        for sock in self._socks:
            sock.close(linger=0)
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        self._socks.append(self._context.socket(kind))
        return self._socks[-1]


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    yield cable
    cable.close()


def test_the_secret_opens(cable: Cable) -> None:
    listener = cable.listener(OURS)
    cable.send(ClusterKeys.derive(SECRET), b"a word")
    assert listener.poll(2000)
    assert listener.recv() == b"a word"


@pytest.mark.parametrize("keys", [OTHERS, None], ids=["another secret", "no key"])
def test_nothing_else_does(cable: Cable, keys: ClusterKeys | None) -> None:
    listener = cable.listener(OURS)
    cable.send(keys, b"a lie")
    cable.send(OURS, b"a word")  # a later one gets through: the first is not merely slow
    assert listener.poll(2000)
    assert listener.recv() == b"a word"
    assert not listener.poll(200)


@pytest.mark.parametrize("keys", [OTHERS, None], ids=["another secret", "no key"])
def test_nobody_passes_for_the_listener(cable: Cable, keys: ClusterKeys | None) -> None:
    impostor = cable.listener(keys)
    cable.send(OURS, b"for friends only")
    assert not impostor.poll(300)


def test_the_two_sides_have_keys_of_their_own() -> None:
    assert OURS.listener != OURS.caller
    assert ClusterKeys.derive(SECRET) == OURS
    assert OURS.listener != OTHERS.listener


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="openssl rand -hex 32"):
        ClusterKeys.derive("password")
