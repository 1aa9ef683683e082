"""The ranks on this machine, each in a process of its own.

Frames pass through unread, so that an engine and a machine that only relays for one use the same class.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator, Sequence

import msgspec
import zmq
from msgspec.structs import replace

from worker import child
from worker.config import Place, WorkerConfig
from worker.ranks.channel import EngineEnd, RankFailed, RankStart

_STOP_SECONDS = 2.0
_EXIT_SECONDS = 1.0  # between the end of a channel and that of its process

_encoder = msgspec.msgpack.Encoder()


class LocalRanks:
    """Starts the rank processes of these places, which meet in a folder if nowhere else; talks to them."""

    def __init__(
        self,
        places: Sequence[Place],
        module: str = "worker.rank_process",
        folder: str | None = None,
        progress_page: str = "",
    ) -> None:
        """`module` is what `python -m` runs. `folder`: where the rendezvous is made, if not in /tmp.

        `progress_page` is the engine's, whose first entry is its own; ranks get the next ones.
        """
        self._places = places
        self._progress_page = progress_page
        self._module = module
        self._parent_folder = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: dict[int, child.Child] = {}
        self._channels: dict[int, EngineEnd] = {}

    def start(self, config: WorkerConfig, log_level: str) -> None:
        for place in self._places:
            self._start(replace(config, place=self._with_rendezvous(place)), log_level)

    def register(self, poller: zmq.Poller) -> None:
        for channel in self._channels.values():
            flags = zmq.POLLIN | zmq.POLLOUT if channel.has_unsent else zmq.POLLIN
            poller.register(channel, 0 if channel.ended else flags)

    def send(self, frame: bytes) -> None:
        for channel in self._channels.values():
            channel.write(frame)

    def receive(self) -> Iterator[tuple[int, bytes]]:
        for rank, channel in self._channels.items():
            if channel.ended:
                continue
            channel.flush()
            for frame in channel.read():
                yield rank, frame
            if channel.ended:
                failed = RankFailed(_describe_end(self._processes[rank]), time.time(), unreported=True)
                yield rank, _encoder.encode(failed)

    def host(self, rank: int) -> str:
        return ""

    def stop(self, *, by_force: bool) -> None:
        for channel in self._channels.values():
            channel.close()
        deadline = time.monotonic() + (0 if by_force else _STOP_SECONDS)
        for process in self._processes.values():
            if not process.ended_within(max(0.0, deadline - time.monotonic())):
                process.kill()
        for process in self._processes.values():
            process.wait()
        self._channels.clear()
        self._processes.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _with_rendezvous(self, place: Place) -> Place:
        if place.rendezvous or place.size == 1:
            return place
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="facet-", dir=self._parent_folder)  # mode 0700
        return replace(place, rendezvous=f"file://{self._folder.name}/rendezvous")

    def _start(self, config: WorkerConfig, log_level: str) -> None:
        rank = config.place.rank
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            entry = 1 + len(self._processes)
            start = RankStart(config, descriptor, log_level, self._progress_page, entry)
            payload = _encoder.encode(start)
            self._processes[rank] = child.start(f"rank {rank}", self._module, payload, inherit=[descriptor])
        self._channels[rank] = EngineEnd(ours)


def _describe_end(process: child.Child) -> str:
    """A clause on how a rank ended whose channel has ended."""
    if not process.ended_within(_EXIT_SECONDS):
        return "it does not listen any more"
    return child.describe_exit(process.wait())
