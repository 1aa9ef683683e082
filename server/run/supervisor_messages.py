"""The messages of the supervisor to an API process: its configuration at the start, later what happens."""

from __future__ import annotations

import msgspec

from engine_core.config import Address
from server.options.server_config import ServerConfig

NOTHING_LEFT = 3
"""The exit code of an API process that need not be started again, because no engine is left."""


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The message with which an API process starts."""

    config: ServerConfig
    address: Address
    index: int
    listener: int
    """The inherited file descriptor of the shared listening socket."""
    reports: int
    """The inherited descriptor of a pipe. The first API process writes a byte there once it serves."""
    progress_page: str
    """The file in which the event loop shows that it goes on."""
    shared_metrics: str | None
    """The folder in which several API processes share their metrics; None if there is one."""
    started: float
    """Start of the command on the monotonic clock, which all processes share."""
    first: bool = True
    """Whether the server has not served yet. Later, the process takes another one's place."""


class EngineExited(msgspec.Struct, frozen=True, tag=True):
    number: int
    code: int
    at: float
    """When, on the monotonic clock."""


class EngineGivenUp(msgspec.Struct, frozen=True, tag=True):
    """An engine has exited and is not started again."""

    number: int
    reason: str
    explained: bool


class EngineStalled(msgspec.Struct, frozen=True, tag=True):
    """An engine has work and makes no progress, or goes on if `stalled` is false."""

    number: int
    stalled: bool


class Served(msgspec.Struct, frozen=True, tag=True):
    """The first API process serves requests: the others listen too, once they can."""


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """The server will end: /ready shall say so, while requests are served as before until SIGTERM."""


class CutOff(msgspec.Struct, frozen=True, tag=True):
    """Running requests shall not be waited for any longer."""


class Reload(msgspec.Struct, frozen=True, tag=True):
    """Files that may be replaced while the server runs shall be read again."""


Message = EngineExited | EngineGivenUp | EngineStalled | Served | Leaving | CutOff | Reload
