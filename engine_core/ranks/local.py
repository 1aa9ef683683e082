"""The ranks of one machine, each in a process of its own: started, spoken to, listened to, ended.

Frames pass unread, so that an engine and a machine that only relays for one need the same.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import zmq
from msgspec.structs import replace

from worker import child
from worker.config import Place, WorkerConfig
from worker.ranks.channel import EngineEnd, RankFailed, RankStart

_STOP_SECONDS = 2.0
_EXIT_SECONDS = 1.0  # between the end of a channel and that of its process

_encoder = msgspec.msgpack.Encoder()


class Crew(Protocol):
    """Some of the ranks of a model, wherever they run."""

    def start(self, config: WorkerConfig, log_level: str) -> None: ...

    def register(self, poller: zmq.Poller) -> None:
        """What to wait for before the next call of `news`."""
        ...

    @property
    def sentinels(self) -> list[int]:
        """Descriptors one of which becomes readable when a rank has ended, and maybe at other times."""
        ...

    def send(self, frame: bytes) -> None:
        """To each of them; never waits."""
        ...

    def news(self) -> Iterator[tuple[int, bytes]]:
        """What has come, and from which rank; never waits. The last from one that ends is a RankFailed."""
        ...

    def where(self, rank: int) -> str:
        """For people: the machine, if that has to be said."""
        ...

    def stop(self, *, at_once: bool) -> None:
        """`at_once`: some hang, because others have ended."""
        ...


class LocalCrew:
    """Ranks that have no rendezvous yet are given one, in a folder of their own."""

    def __init__(
        self, places: Sequence[Place], module: str = "worker.ranks.process", folder: str | None = None
    ) -> None:
        """`module` is what `python -m` runs. `folder`: where theirs is made, if not among temporary files."""
        self._places = places
        self._module = module
        self._home = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: dict[int, child.Child] = {}
        self._lines: dict[int, EngineEnd] = {}

    def start(self, config: WorkerConfig, log_level: str) -> None:
        for place in self._places:
            self._start(replace(config, place=self._invite(place)), log_level)

    def register(self, poller: zmq.Poller) -> None:
        for line in self._lines.values():
            flags = zmq.POLLIN | zmq.POLLOUT if line.has_unsent else zmq.POLLIN
            poller.register(line, 0 if line.ended else flags)

    @property
    def sentinels(self) -> list[int]:
        return [line.fileno() for line in self._lines.values()]

    def send(self, frame: bytes) -> None:
        for line in self._lines.values():
            line.write(frame)

    def news(self) -> Iterator[tuple[int, bytes]]:
        for rank, line in self._lines.items():
            if line.ended:
                continue
            line.flush()
            for frame in line.read():
                yield rank, frame
            if line.ended:
                ending = RankFailed(_ending(self._processes[rank]), time.time(), unreported=True)
                yield rank, _encoder.encode(ending)

    def where(self, rank: int) -> str:
        return ""

    def stop(self, *, at_once: bool) -> None:
        for line in self._lines.values():
            line.close()
        deadline = time.monotonic() + (0 if at_once else _STOP_SECONDS)
        for process in self._processes.values():
            if not process.ended_within(max(0.0, deadline - time.monotonic())):
                process.kill()
        for process in self._processes.values():
            process.wait()
        self._lines.clear()
        self._processes.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _invite(self, place: Place) -> Place:
        if place.rendezvous or place.size == 1:
            return place
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="facet-", dir=self._home)  # mode 0700
        return replace(place, rendezvous=f"file://{self._folder.name}/rendezvous")

    def _start(self, config: WorkerConfig, log_level: str) -> None:
        rank = config.place.rank
        ours, theirs = socket.socketpair()
        with theirs:
            channel = theirs.fileno()
            payload = _encoder.encode(RankStart(config, channel, log_level))
            self._processes[rank] = child.start(f"rank {rank}", self._module, payload, inherit=[channel])
        self._lines[rank] = EngineEnd(ours)


def _ending(process: child.Child) -> str:
    if not process.ended_within(_EXIT_SECONDS):
        return "it does not listen any more"
    return child.describe_exit(process.wait())
