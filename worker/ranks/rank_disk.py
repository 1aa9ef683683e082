"""The blocks on disk of a rank that has a process of its own: its engine orders what is done, and is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from worker.cache_tiers.block_read import BlockRead
from worker.ranks.channel import DiskKind, DiskNews, DiskOrder

if TYPE_CHECKING:  # a rank's process listens before it loads torch, which stores import
    from worker.cache_tiers.tiered_store import Store


class RankDisk:
    """Obeys a rank's orders for blocks and, if it has some, for states."""

    def __init__(self, store: Store, send: Callable[[DiskNews], None], kind: DiskKind = "blocks") -> None:
        """`send`: a function that tells the engine something, from any thread."""
        self._store, self._send = store, send
        self._kind: DiskKind = kind
        self._beside: dict[DiskKind, RankDisk] = {}
        if store.states is not None:
            self._beside["states"] = RankDisk(store.states, send, "states")
        self._reads: dict[int, tuple[BlockRead, list[bool]]] = {}
        """By their numbers the reads that are not done, and which of their blocks were told of."""
        self._writes = 0
        self._told: set[bytes] = set()
        self._told_version = -1
        self._telling = threading.RLock()
        store.tell_blocks(self._tell)
        self._tell()

    def obey(self, order: DiskOrder) -> None:
        """Do what is ordered, or have threads do it."""
        if order.kind != self._kind:
            if (other := self._beside.get(order.kind)) is not None:
                other.obey(order)
            return
        match order.task:
            case "write":
                with self._telling:  # else a thread tells that it is written before it has begun
                    self._writes += 1
                    self._store.write(order.names, order.blocks)
            case "read":
                read = BlockRead(order.names, order.blocks)
                with self._telling:
                    self._reads[order.number] = read, [False] * len(order.names)
                self._store.read(read)
            case "end":
                with self._telling:
                    read, _ = self._reads.pop(order.number)
                self._store.end(read, time.monotonic())
                self._tell()
            case "look":
                self._store.look()
            case "forget":
                self._store.forget_all()
                self._tell()

    def _tell(self, _: object = None) -> None:
        with self._telling:
            self._send(self._news())

    def _news(self) -> DiskNews:
        store, found, lost = self._store, list[bytes](), list[bytes]()
        written = self._writes if store.rest(0.0) else self._writes - 1
        if (version := store.version) != self._told_version:
            names = store.names()
            found, lost = list(names - self._told), list(self._told - names)
            self._told, self._told_version = names, version
        loaded: dict[int, list[int]] = {}
        done = [number for number, (read, _) in self._reads.items() if read.done.is_set()]
        for number, (read, told) in self._reads.items():
            loaded[number] = [at for at, here in enumerate(read.loaded) if here and not told[at]]
            for at in loaded[number]:
                told[at] = True
        return DiskNews(
            *(store.block_bytes, store.most, store.totals, written, store.write_seconds, store.pause),
            store.room,
            self._kind,
            *(found, lost, loaded, done),
        )
