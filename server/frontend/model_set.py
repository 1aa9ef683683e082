"""Decides which of several models are in memory: those that are asked for, within a budget.

A model is loaded when somebody asks for it, one at a time. If that needs room, models go that nobody uses,
those first that were not used for longest. Where all are in use, the load waits; after a while no new
requests are let in to those that are in its way, so that it has its turn. Background work has a model
loaded only when that takes nothing from others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, Literal, Protocol, TypeVar

from server.errors import ApiError, Internal, Unavailable
from server.helpers.job_queue import begin_task

LOOK_SECONDS = 1.0
"""Seconds between looks whether background work may have a model loaded."""
RETRY_SECONDS = 10.0
"""Seconds after a failed load in which nobody has it tried again."""
REST_SECONDS = 10.0
"""Seconds after its last request before a model goes for one that only background work asks for."""
PATIENCE = 0.5
"""Seconds for which a load waits for models that are in use, before these let nobody else in."""

State = Literal["unloaded", "loading", "loaded", "unloading"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Slot(Generic[T]):
    """A model, in memory or not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: State = "unloaded"
        self.served: T | None = None
        """What answers its requests, while it is loaded."""
        self.size = 0
        """The bytes that it takes, or would take, as far as is known."""
        self.users = 0
        """The requests that it is answering."""
        self.waiting = 0
        """The requests that wait for it to be loaded."""
        self.used = 0.0
        """When it was last used, on the monotonic clock."""
        self.closed = False
        """Whether it lets no new requests in, because others wait for its room."""
        self.removed = False
        """Whether it is none of the server's models any more, and goes as soon as nobody uses it."""
        self.error: ApiError | None = None
        """Why it was not loaded when that was last tried, or why its engine has ended."""
        self.failed = 0.0
        """When that was."""

    @property
    def has_memory(self) -> bool:
        """Whether its memory counts. One that is being loaded gets some last."""
        return self.state in ("loaded", "unloading")


class Loader(Protocol[T]):
    """Loads and unloads models."""

    async def measure(self, slot: Slot[T], /) -> int:
        """The bytes that a model will take, as far as its files tell. It may be downloaded first."""
        ...

    async def load(self, slot: Slot[T], /) -> T:
        """Returns what answers a model's requests, and sets the slot's size. Raises ApiError."""
        ...

    async def unload(self, slot: Slot[T], served: T, /) -> None:
        """Returns when the model's memory is given back."""
        ...

    async def taken_beside(self, loaded: Iterable[Slot[T]], /) -> int:
        """The bytes that all but models take. The sizes of models that have grown are corrected."""
        ...


class ModelSet(Generic[T]):
    def __init__(self, loader: Loader[T], budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`budget` is for all processes of the server, in bytes."""
        self.slots: list[Slot[T]] = []
        """All models that are served, and those that are not any more but still in memory."""
        self.budget = budget
        self._loader, self._clock = loader, clock
        self._beside, self._least_beside = 0, budget
        """The bytes that all but models take, as measured last, and at least."""
        self._load_turn = asyncio.Lock()
        """Held while a model is loaded, or waits for room. Whoever waits gets it in turn."""
        self._changed = asyncio.Event()
        """Set, and replaced by another one, whenever a model's state or number of users has changed."""
        self._tasks = set[asyncio.Task[Any]]()
        self._closed = False

    # Requests.

    async def enter(self, slot: Slot[T], *, retry: bool = False, background: bool = False) -> T:
        """Wait until a model is loaded, and count a user. Call `leave` afterwards. Raises ApiError.

        `retry`: it is loaded also if that has just failed. `background`: it is not loaded in place of models
        that are in use, or were a moment ago; it is used if it is there.
        """
        slot.waiting += 1
        if slot not in self.slots:  # it was removed while the request was on its way
            self.slots.append(slot)
        try:
            if slot.error is not None and not retry and self._clock() - slot.failed < RETRY_SECONDS:
                raise slot.error.with_traceback(None)
            slot.error = None
            while slot.served is None or slot.closed:
                if self._closed:
                    raise Unavailable("The server is ending.", reason="draining")
                if slot.error is not None:
                    raise slot.error.with_traceback(None)  # which would grow with each request
                waits = background and slot.state == "unloaded" and await self._is_in_the_way(slot)
                if slot.state == "unloaded" and not waits:
                    slot.state = "loading"
                    begin_task(self._load(slot), self._tasks)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS if waits else None):
                        await self._changed.wait()
            slot.users += 1
            return slot.served
        finally:
            slot.waiting -= 1

    async def _is_in_the_way(self, slot: Slot[T]) -> bool:
        """Whether others would wait for a model to be loaded, or would have to be loaded again soon."""
        slot.size = slot.size or await self._loader.measure(slot)
        others = [one for one in self.slots if one is not slot]
        taken = self._beside + sum(one.size for one in self.slots if one.state != "unloaded")
        rested = [one for one in others if self._rests(one)]
        missing = taken + slot.size - self.budget - sum(one.size for one in rested if one.has_memory)
        return missing > 0 and any(one.state != "unloaded" for one in others if one not in rested)

    def _rests(self, slot: Slot[T]) -> bool:
        """Whether nobody uses a model, nor did a moment ago."""
        is_used = slot.users or slot.waiting or slot.state == "loading"
        return not is_used and self._clock() - slot.used >= REST_SECONDS

    def leave(self, slot: Slot[T]) -> None:
        slot.users -= 1
        slot.used = self._clock()
        if slot.removed and not slot.users and slot.state == "loaded":
            begin_task(self.unload(slot), self._tasks)
        self._notice()

    # Models.

    async def unload(self, slot: Slot[T]) -> bool:
        """Have a model give its memory back, if nobody uses it; returns whether it has none now."""
        if slot.state == "loaded" and not slot.users:
            served, slot.served = slot.served, None
            slot.state = "unloading"
            assert served is not None
            await asyncio.shield(begin_task(self._unload(slot, served), self._tasks))
        return slot.state == "unloaded"

    async def _unload(self, slot: Slot[T], served: T) -> None:
        try:
            await self._loader.unload(slot, served)
        finally:
            self._free(slot)

    def lose(self, slot: Slot[T], error: ApiError) -> None:
        """Note that the engine of a loaded model has ended for good."""
        if slot.state == "loaded":
            slot.error, slot.failed, slot.served = error, self._clock(), None
            self._free(slot)

    def add(self, slot: Slot[T]) -> None:
        """Serve a model from now on, or again."""
        slot.removed = False
        if slot not in self.slots:
            self.slots.append(slot)

    def remove(self, slot: Slot[T]) -> None:
        """Serve a model no more, but to those who use it."""
        slot.removed = True
        if slot.state == "loaded" and not slot.users:
            begin_task(self.unload(slot), self._tasks)
        elif slot.state == "unloaded" and not slot.waiting:
            self.slots.remove(slot)

    async def shrink(self) -> None:
        """Unload what nobody uses until all is within the budget again: models may have grown."""
        async with self._load_turn:
            while await self._excess(0) > 0 and (idle := self._idle()):
                await self.unload(idle[0])

    def refuse(self) -> None:
        """Let nobody in any more; whoever waits is refused."""
        self._closed = True
        self._notice()

    async def close(self) -> None:
        """Load nothing more."""
        self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _free(self, slot: Slot[T]) -> None:
        slot.state, slot.closed = "unloaded", False
        if slot.removed and slot in self.slots and not slot.waiting:
            self.slots.remove(slot)
        self._notice()

    async def _load(self, slot: Slot[T]) -> None:
        try:
            slot.size = await self._loader.measure(slot)
            async with self._load_turn:
                if not slot.waiting:
                    return  # whoever asked for it has left
                await self._make_room(slot)
                slot.served = await self._loader.load(slot)
                slot.state, slot.used = "loaded", self._clock()
        except ApiError as error:
            slot.error, slot.failed = error, self._clock()
        except Exception:
            _log.exception("the model %s cannot be loaded", slot.name)
            slot.error, slot.failed = Internal("Internal server error"), self._clock()
        finally:
            if slot.served is None:
                self._free(slot)
        self._notice()
        await self.shrink()

    async def _make_room(self, wanted: Slot[T]) -> None:
        """Returns when there is room for a model. Raises Unavailable if there never will be."""
        since = self._clock()
        try:
            while (excess := await self._excess(wanted.size)) > 0:
                others = [one for one in self.slots if one.has_memory]
                # The server's own memory for models, their tokenizers for example, goes with them.
                own = self._beside - self._least_beside if others else 0
                if sum(one.size for one in others) + own < excess:
                    raise _too_large(wanted, excess)
                if idle := self._idle():
                    await self.unload(idle[0])
                    continue
                changed, late = self._changed, self._clock() - since >= PATIENCE
                if late:
                    self._close_others(others, excess)
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), None if late else PATIENCE)
        finally:
            for one in self.slots:
                one.closed = False
            self._notice()

    async def _excess(self, size: int) -> int:
        """The bytes by which the budget would be exceeded with so many more."""
        self._beside = await self._loader.taken_beside([one for one in self.slots if one.state == "loaded"])
        self._least_beside = min(self._least_beside, self._beside)
        return self._beside + sum(one.size for one in self.slots if one.has_memory) + size - self.budget

    def _idle(self) -> list[Slot[T]]:
        """The models that nobody uses, the least recently used first."""
        loaded = [one for one in self.slots if one.state == "loaded"]
        # Those who wait for one that is open enter it in a moment.
        found = [one for one in loaded if not one.users and (one.closed or not one.waiting)]
        return sorted(found, key=lambda one: (not one.removed, one.used))

    def _close_others(self, others: list[Slot[T]], excess: int) -> None:
        """Let nobody else in to as many models as are in the way, the least recently used first."""
        for one in sorted(others, key=lambda one: (not one.closed, one.used)):
            if excess > 0:
                one.closed, excess = True, excess - one.size

    def _notice(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _too_large(slot: Slot[T], excess: int) -> Unavailable:
    return Unavailable(
        f"The model {slot.name} does not fit: it needs {slot.size >> 20} MiB, {excess >> 20} MiB more than "
        "--memory leaves to it.",
        reason="load_failed",
    )
