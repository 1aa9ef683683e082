"""The messages between an engine and a rank that has a process of its own, and the socket that carries them.

The first message to a rank is a RankStart. From then on every message to it is an Order: a StepInput, in the
order in which steps have to run, the StepBounds of one of them, Prepare, a DiskOrder or a WorkerCall, in the
frames that `worker.buffers.Encoder` makes of it. Every frame from it is a RankMessage. The end of the channel
ends the rank. This module imports no torch.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedReader
from typing import Literal

import msgspec

from worker.buffers import Bytes
from worker.calls.messages import WorkerCall, WorkerReturn
from worker.config import WorkerConfig
from worker.protocol import DiskTotals, StepBounds, StepInput, StepOutput
from worker.worker_facts import WorkerFacts

_LENGTH_BYTES = 8
_CHUNK = 1 << 18


class RankStart(msgspec.Struct, frozen=True):
    """The start of a rank: its options, and its end of the channel."""

    config: WorkerConfig
    descriptor: int
    """The file descriptor of the rank's end."""
    log_level: str
    progress_page: str = ""
    """The file in which it shows how its steps go on, if anyone reads that."""
    progress_entry: int = 0
    """The number of its entry there."""


class RankProgress(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The progress of loading the model."""

    phase: str
    fraction: float


class RankReady(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The model is loaded, and steps may come."""

    facts: WorkerFacts


class StepFailed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """This step failed, and the next one can run. Only a rank that is alone sends it."""

    number: int
    message: str


class RankFailed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The rank has ended."""

    message: str
    at: float
    """Seconds since the epoch. The first rank to fail is the one to name: others fail because it did."""
    unreported: bool = False
    """True if the rank sent no message itself: this is what its parent saw."""


class Prepare(msgspec.Struct, frozen=True, tag=True, gc=False):
    """No step is in flight: the rank prepares something that makes later ones quicker."""


class RankPrepared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Something is prepared. Only the rank that returns outputs sends it."""

    left: bool
    """Whether there is more."""


DiskTask = Literal["write", "read", "end", "look", "forget"]
DiskKind = Literal["blocks", "states"]
"""The kinds of records that ranks keep on disk; what is said of blocks here holds for all of them."""


class DiskOrder(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """A task for the blocks that the rank keeps on disk, behind all steps that were sent before."""

    task: DiskTask
    kind: DiskKind = "blocks"
    number: int = 0
    """The number of a read, which `end` gives up if it is not done."""
    names: list[bytes] = []
    blocks: list[int] = []


class DiskNews(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The state of the blocks that a rank keeps on disk, and what has changed since it was told last."""

    block_bytes: int
    most: int
    """The most blocks that are written at once."""
    totals: DiskTotals
    written: int
    """The number of orders to write that have been obeyed, whatever came of them."""
    write_seconds: float
    pause: float
    """The seconds for which nothing shall be written."""
    room: int | None = None
    """The most blocks that it holds, if it is memory."""
    kind: DiskKind = "blocks"
    found: list[bytes] = []
    """The names of blocks that can be found now, and could not before."""
    lost: list[bytes] = []
    """The names of those that could be found before."""
    loaded: dict[int, list[int]] = {}
    """The number of each read -> the places in it of blocks that have come."""
    done: list[int] = []
    """The reads of which nothing more will come."""


Order = StepInput | StepBounds | Prepare | DiskOrder | WorkerCall
"""What an engine sends to a rank that has started."""

RankMessage = (
    RankProgress | RankReady | RankPrepared | DiskNews | WorkerReturn | StepOutput | StepFailed | RankFailed
)


def _lengths(data: bytes | bytearray) -> list[int]:
    return [
        int.from_bytes(data[at : at + _LENGTH_BYTES], "little") for at in range(0, len(data), _LENGTH_BYTES)
    ]


class RankEnd:
    """The rank's end of the channel: every call waits until it is done."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._file = BufferedReader(self._socket.makefile("rb", buffering=0), _CHUNK)

    def read(self) -> list[bytearray] | None:
        """The frames of the next message; None if there will be no more."""
        try:
            (count,) = _lengths(self._bytes(_LENGTH_BYTES))
            return [self._bytes(size) for size in _lengths(self._bytes(_LENGTH_BYTES * count))]
        except (EOFError, ConnectionResetError):  # the engine may have left ours unread
            return None

    def write(self, frame: bytes) -> None:
        """Send a frame. If the engine is gone, do nothing: the reader sees that the channel has ended."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        if self._file.readinto(data) < count:
            raise EOFError
        return data


class EngineEnd:
    """The engine's end of the channel: no call waits. Bytes that a busy rank does not take are sent later."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def write(self, frames: Sequence[Bytes]) -> None:
        """Send a message, whose first frame alone is copied."""
        first, *others = (memoryview(frame).cast("B") for frame in frames)
        numbers = (len(frames), len(first), *map(len, others))
        lengths = [number.to_bytes(_LENGTH_BYTES, "little") for number in numbers]
        self._unsent += (memoryview(b"".join((*lengths, first))), *others)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
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
            self._unsent.clear()  # the next read shows that the rank has ended, and its last messages

    def read(self) -> list[bytes]:
        """All frames that have arrived. `ended` is set once there will be no more."""
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
        """The whole frames among the bytes received, which are removed from them."""
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
