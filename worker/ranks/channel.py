"""What goes between an engine and a rank that has a process of its own, and the socket through which it goes.

The first word to a rank is a RankStart. From then on every frame to it is a StepInput, in the order in which
steps have to run, and every frame from it a RankSays. The end of the channel ends the rank. No torch.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress

import msgspec

from worker.config import WorkerConfig
from worker.protocol import StepOutput, WorkerFacts

_LENGTH_BYTES = 8
_CHUNK = 1 << 18


class RankStart(msgspec.Struct, frozen=True):
    config: WorkerConfig
    channel: int
    """The descriptor of this rank's end."""
    log_level: str


class RankProgress(msgspec.Struct, frozen=True, tag=True, gc=False):
    stage: str
    fraction: float


class RankReady(msgspec.Struct, frozen=True, tag=True, gc=False):
    facts: WorkerFacts


class StepFailed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """This step broke, and the next one can run. Said by a rank that is alone; of several, none can go on."""

    number: int
    message: str


class RankFailed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The rank has ended."""

    message: str
    at: float
    """Seconds since the epoch. The first one to fail is to be named: others fail for want of it."""
    silent: bool = False
    """It said nothing itself: this is what was seen from outside."""


RankSays = RankProgress | RankReady | StepOutput | StepFailed | RankFailed


class Channel:
    """A rank's end: every call waits until it is done."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._file = self._socket.makefile("rb", buffering=_CHUNK)

    def read(self) -> bytes | None:
        """The next frame; None if there will be no more."""
        try:
            head = self._file.read(_LENGTH_BYTES)
            size = int.from_bytes(head, "little")
            frame = self._file.read(size)
        except ConnectionResetError:  # the end, before all was read that this rank has said
            return None
        return frame if len(head) == _LENGTH_BYTES and len(frame) == size else None

    def write(self, frame: bytes) -> None:
        """To an engine that is gone, nothing is written: the lifeline tells that to those who care."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class Line:
    """The engine's end: no call waits. What a busy rank does not take yet is kept and sent by later calls."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def behind(self) -> bool:
        """Something is still to be sent."""
        return bool(self._unsent)

    def write(self, frame: bytes) -> None:
        self._unsent.append(memoryview(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame))
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                first = self._unsent[0]
                sent = self._socket.send(first)
                self._unsent[0] = first[sent:]
                if sent == len(first):
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()  # reading tells that it has ended, and what it said before

    def read(self) -> list[bytes]:
        """All frames that have come."""
        try:
            while part := self._socket.recv(_CHUNK):
                self._received += part
            self.ended = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.ended = True
        return self._split()

    def close(self) -> None:
        self._socket.close()

    def _split(self) -> list[bytes]:
        frames: list[bytes] = []
        at = 0
        while len(self._received) - at >= _LENGTH_BYTES:
            start = at + _LENGTH_BYTES
            stop = start + int.from_bytes(self._received[at:start], "little")
            if stop > len(self._received):
                break
            frames.append(bytes(self._received[start:stop]))
            at = stop
        del self._received[:at]
        return frames
