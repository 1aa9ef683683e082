"""A job of helper processes: its name, where its code is, and its limits of time and memory.

The rows are BODIES (`server/reading/long_bodies.py`), GRAMMARS (`server/grammar_checks/grammar_checker.py`),
MEDIA (`server/media/preparing.py`) and RECORDINGS (`server/media/audio/recordings.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from server.errors import ApiError
from worker import child

A = TypeVar("A")


class Ended(Exception):
    """Raised when a helper process has ended at an order, or was killed because that took too long."""

    def __init__(self, seconds: float, code: int | None) -> None:
        """`seconds`: what it might have taken. `code`: the exit code, None if it was killed."""
        super().__init__("it took too long" if code is None else child.describe_exit(code))
        self.seconds, self.code = seconds, code


@dataclass(frozen=True)
class Job(Generic[A]):
    """A kind of work for helper processes, of which each does one piece at a time.

    `A` is the type of an answer, which is a tagged struct, or one of several.
    """

    name: str
    """The plural of what orders are about: the name of its processes, and a word of messages to clients."""
    module: str
    """The module whose `open_job` the process calls with its setup; what that returns follows orders."""
    answer: Any
    """The type of an answer."""
    explain: Callable[[Any, Ended], ApiError | None]
    """Makes the error for an order at which the process ended; None says that it can be sent again."""
    memory: int
    """Bytes of address space beyond those that the process has when it waits. Allocators reserve some hundred
    megabytes that they do not use."""
    seconds: float
    """Seconds for an order, and for each MiB of its data so many more:"""
    seconds_per_mib: float = 0.0
    processor_seconds: float = 0.0
    """Seconds of a processor, after which the kernel ends the process with SIGPROF; 0 for no limit."""
    processes: int = 1
    waiting_bytes: int = 512 << 20
    """Bytes of all orders together that wait or are followed. One alone may have more."""
    owner_waiting: int | None = None
    """The most orders of one owner that wait."""
    waiting_seconds: float | None = None
    """The seconds for which an order waits at most."""

    def seconds_for(self, size: int) -> float:
        return self.seconds + self.seconds_per_mib * size / (1 << 20)
