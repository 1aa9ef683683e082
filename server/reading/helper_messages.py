"""Messages between an API process and its helper, in msgpack."""

from __future__ import annotations

import msgspec

from server.model_facts import Facts
from server.offload.refused import Refused
from server.reading.reader import ReadingOptions
from server.text.tokenizer_files import TokenizerFiles


class HelperLimits(msgspec.Struct, frozen=True):
    """What reading one body may take. It is killed that takes more."""

    seconds: float = 5.0
    """Seconds for any body; and for each MiB of a long one so many more:"""
    seconds_per_mib: float = 2.5
    memory: int = 3 << 29
    """Bytes of address space beyond those that the process has when it waits for bodies. Allocators reserve
    some hundred megabytes that they do not use."""
    template_seconds: float = 2.0
    """Seconds for one conversation, of those."""
    template_memory: int = 256 << 20
    kept_memory: int = 128 << 20
    """The process ends after a body of which so many bytes are left: some libraries give back little."""
    start_seconds: float = 60.0
    waiting_bytes: int = 128 << 20
    """Bytes of all bodies together that wait for the process."""

    def seconds_for(self, size: int) -> float:
        return self.seconds + self.seconds_per_mib * size / (1 << 20)


class Setup(msgspec.Struct, frozen=True):
    """What a helper is started with."""

    socket: int
    """The inherited descriptor of its end of the connection."""
    tokenizer: TokenizerFiles
    options: ReadingOptions
    limits: HelperLimits
    log_level: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The helper's first message."""


class Job(msgspec.Struct, frozen=True, tag=True):
    """An order to read a body, which follows in a frame of its own, as bytes."""

    reading: str
    """The name of an entry of `server.reading.readings`."""
    facts: Facts


class Done(msgspec.Struct, frozen=True, tag=True):
    body: bytes
    """The body as JSON, with stand-ins for its texts."""
    result: msgspec.Raw
    """What was read of the texts."""


Answer = Done | Refused
