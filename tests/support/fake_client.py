"""An EngineClient without an engine: a test sees what was submitted, and gives the answers."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from model_facts import READY, changed

from engine_core.client.in_flight import AddOptions, Stream
from engine_core.client.operator_commands import OperatorCommands
from engine_core.client.replica import EndCode, Replica, Stalled
from engine_core.client.replica_routing import ReplicaTable
from engine_core.config import Replicas
from engine_core.engine_stats import Stats
from engine_core.protocol import (
    Failed,
    PauseAll,
    Pooled,
    Progress,
    Ready,
    Request,
    ResumeAll,
    Sleep,
    Standing,
    Tokens,
)
from worker.calls.messages import CallFailed
from worker.protocol import Pooling, Sampling, Vectors


@dataclass
class Submitted:
    tokens: list[int]
    params: Any
    options: AddOptions
    stream: Stream[Any]
    replica: int | None = None

    def say(self, tokens: Iterable[int], **fields: object) -> None:
        self.stream.put(Tokens(id=self.stream.id, tokens=list(tokens), **fields))  # pyright: ignore

    def answer(self, numbers: Iterable[float], **fields: Any) -> None:
        """Answer with one vector."""
        vector = np.asarray(list(numbers), dtype="<f4")
        vectors = Vectors(vector.tobytes(), vector.shape)
        self.stream.put(Pooled(id=self.stream.id, vectors=vectors, **fields))

    def fail(self, code: int, message: str) -> None:
        self.stream.put(Failed(id=self.stream.id, code=code, message=message))


class FakeClient:
    def __init__(self) -> None:
        self.progress = Progress(phase="start", fraction=0.0)
        self.folder = ""
        self.replicas: list[Replica] = []
        self.on_change: Callable[[], None] = lambda: None
        self.ready: Ready | None = None
        self.dead: str | None = None
        self.restarting: EndCode | Stalled | None = None
        self.stats: Stats | None = None
        self.folder_known, self.ready_or_dead, self.died = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.submitted: list[Submitted] = []
        self.aborted: list[int] = []
        self.paused: set[int] = set()
        self.standings: dict[int, Standing] = {}
        """How far requests have come, for those who ask."""
        self.told: list[Request] = []
        """The orders that the operator has given."""
        self.cannot_wake = ""
        self._table = ReplicaTable(Replicas(), 1)
        self.orders = OperatorCommands(self._table, self._obey)
        self._numbers = count(1 << 40)

    def _obey(self, number: int, order: Request) -> None:
        self.told.append(order)
        if isinstance(order, PauseAll | ResumeAll):
            self.orders.note_paused(number, paused=isinstance(order, PauseAll))
        if isinstance(order, Sleep):
            replica = self._table.replicas[number]
            replica.asleep = bool(order.level or self.cannot_wake)
            replica.progress = Progress("asleep", 1.0, detail=self.cannot_wake)

    def locate(self, folder: Path) -> None:
        self.progress = Progress(phase="import", fraction=0.0, folder=str(folder))
        self.folder = str(folder)
        self.folder_known.set()

    def become_ready(self, **facts: object) -> None:
        self.ready = changed(READY, folder=self.folder, **facts)
        self.restarting = None
        self.ready_or_dead.set()
        self.on_change()

    def restart(self, how: EndCode) -> None:
        """Lose the engine, which will be back."""
        self.ready, self.restarting = None, how
        self.on_change()

    def fail(self, reason: str) -> None:
        self.dead = reason
        for one in self.submitted:
            one.fail(503, reason)
        for event in (self.folder_known, self.ready_or_dead, self.died):
            event.set()

    def submit(
        self,
        tokens: list[int],
        params: Sampling,
        *,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> Stream[Tokens]:
        stream = Stream[Tokens](len(self.submitted) + 1, asyncio.get_running_loop())
        self.submitted.append(Submitted(tokens, params, options, stream, replica))
        return stream

    def submit_all(
        self,
        prompts: Iterable[tuple[list[int], Sampling]],
        *,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> list[Stream[Tokens]]:
        streams: list[Stream[Tokens]] = []
        for tokens, params in prompts:
            streams.append(self.submit(tokens, params, replica=replica, **options))
        return streams

    def submit_many(
        self,
        requests: Iterable[tuple[list[int], Pooling]],
        *,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> list[Stream[Pooled]]:
        first = len(self.submitted)
        for tokens, params in requests:
            stream = Stream[Pooled](len(self.submitted) + 1, asyncio.get_running_loop(), pools=True)
            self.submitted.append(Submitted(tokens, params, options, stream, replica))
        return [one.stream for one in self.submitted[first:]]

    async def standing(self, id: int) -> Standing | None:
        return self.standings.get(id)

    def pause(self, ids: Iterable[int]) -> None:
        self.paused.update(ids)

    def resume(self, ids: Iterable[int]) -> None:
        self.paused.difference_update(ids)

    async def call_workers(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Returns what was called, as if one worker had."""
        if method == "fail":
            raise CallFailed("no such thing")
        return [[method, args, kwargs]]

    def new_number(self) -> int:
        return next(self._numbers)

    def abort(self, ids: Iterable[int]) -> None:
        for id in ids:
            if id not in self.aborted:
                self.aborted.append(id)
                request = self.submitted[id - 1]
                if request.stream.pools:
                    request.fail(503, "aborted")
                else:
                    request.say([], finish="abort")
