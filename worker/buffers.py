"""Large bytes within messages, such as pixels: each travels in a frame of its own behind the message that
holds it, and is never copied into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")


class Buffer:
    """Bytes that a message holds. What holds them is dropped as soon as they are not needed any more."""

    __slots__ = ("data",)

    def __init__(self, data: Bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return memoryview(self.data).nbytes


class Encoder:
    """Writes messages as msgpack. In the place of each buffer there is the number of its frame."""

    def __init__(self) -> None:
        self._frames: list[Bytes] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._number)

    def encode(self, message: object) -> list[Bytes]:
        """The message's own frame, then those of its buffers. The same buffer again has the same frame."""
        self._frames = []
        head = self._encoder.encode(message)
        frames, self._frames = self._frames, []
        return [head, *frames]

    def _number(self, value: object) -> int:
        if not isinstance(value, Buffer):
            raise TypeError(f"a message holds a {type(value).__name__}")
        for number, data in enumerate(self._frames):
            if data is value.data:
                return number
        self._frames.append(value.data)
        return len(self._frames) - 1


class Decoder(Generic[T]):
    """Reads messages of one type. Raises msgspec.DecodeError if frames are missing, or if some are left."""

    def __init__(self, kind: Any) -> None:
        self._frames: Sequence[Bytes] = ()
        self._used: set[int] = set()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, dec_hook=self._buffer)

    def decode(self, head: Bytes, frames: Sequence[Bytes] = ()) -> T:
        if not frames:
            return self._decoder.decode(head)
        self._frames, self._used = frames, set()
        try:
            message = self._decoder.decode(head)
            if len(self._used) < len(frames):
                raise msgspec.ValidationError(f"{len(frames)} frames, of which {len(self._used)} are named")
            return message
        finally:
            self._frames = ()

    def _buffer(self, kind: type, number: object) -> Buffer:
        if kind is not Buffer or not isinstance(number, int) or not 0 <= number < len(self._frames):
            raise msgspec.ValidationError(f"frame {number} is missing")
        self._used.add(number)
        return Buffer(self._frames[number])


def schema_of_buffer(kind: type) -> dict[str, str]:
    """How a buffer is written in a message, for the digests of protocols."""
    return {"type": "integer", "title": kind.__name__}
