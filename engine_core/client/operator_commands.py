"""Orders of an operator to all engines of a model: to end, to forget prefixes, to pause, to sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from engine_core import protocol
from engine_core.client.replica import Replica
from engine_core.client.replica_routing import ReplicaTable
from worker.calls.messages import NoWorkers


class WeightsTaken(ValueError):
    """Another server has ordered weights, which engines have not loaded yet."""


class OperatorCommands:
    def __init__(self, table: ReplicaTable, notify: Callable[[int, protocol.Request], None]) -> None:
        """`notify` sends to the engine of a number, if it can be reached."""
        self._table = table
        self._notify = notify
        self._waiting: list[tuple[Callable[[], bool], asyncio.Event]] = []
        """Conditions that somebody waits for, each with what tells that it has been true."""
        self.asleep = False
        """Whether an engine sleeps. Requests are refused then, whatever the others do."""
        self.paused = False
        """Whether engines shall plan no steps, as was ordered here, or as one of them has told since."""
        self._sleep = protocol.Sleep(1)
        """The last order to sleep."""
        self._awake: set[int] = set()
        """The engines that have yet to tell that they sleep since then, unless they have been woken."""
        self._changing: set[int] = set()
        """The engines that have yet to tell that they have paused, or gone on."""
        self._updating = asyncio.Lock()
        self._answers: dict[int, protocol.WeightsUpdated | None] = {}
        """What each engine tells of the weights that were ordered last; None: nothing yet."""
        self._update_number = 0
        """The number of the last order of weights; those of engines that come back have 0."""
        self.weights = ""
        """The folder whose weights engines have, if they are not those of their start."""

    def tell(self, order: protocol.Request) -> None:
        for number in list(self._table.replicas):
            self._notify(number, order)

    def reset_prefix_cache(self) -> None:
        """Have all engines forget what they keep of prompts."""
        self._table.forget_prefixes()
        self.tell(protocol.ResetPrefixCache())

    async def pause(self, mode: protocol.PauseMode, *, clear_cache: bool = True) -> None:
        """Have all engines plan no more steps, and wait until none computes anything."""
        if clear_cache and mode != "keep":
            self._table.forget_prefixes()
        await self._change(protocol.PauseAll(mode, clear_cache))

    async def resume(self) -> None:
        """Have all engines plan steps again."""
        await self._change(protocol.ResumeAll())

    async def _change(self, order: protocol.PauseAll | protocol.ResumeAll) -> None:
        self.paused = isinstance(order, protocol.PauseAll)
        self._changing.update(self._table.replicas)
        self.tell(order)
        await self.until(lambda one: one.number not in self._changing)

    def note_paused(self, number: int, *, paused: bool) -> None:
        """Take note that an engine has paused, or goes on."""
        self.paused = paused
        self._changing.discard(number)
        self.notice()

    def welcome(self, number: int, weights: str) -> None:
        """Have an engine that has come, or come back, use the weights of others, and pause if these do, or
        sleep if it was told to, or slept before it ended."""
        self.weights = weights or self.weights
        if self.weights and not weights:
            self._notify(number, protocol.UpdateWeights(self.weights, "catch_up"))
        if self.paused:
            self._notify(number, protocol.PauseAll("keep"))
        if number in self._awake or self._table.replicas[number].slept:
            self._notify(number, self._sleep)

    def note_asleep(self, number: int) -> None:
        """Take note that an engine sleeps."""
        self._awake.discard(number)
        self._table.replicas[number].slept = False

    async def update_weights(self, folder: str, *, abort: bool = False) -> None:
        """Have all engines compute with the weights of a folder, once all have said that these fit.

        Raises ValueError if one cannot, WeightsTaken if another server has ordered some before: that one wins
        which is the first at the first engine, and NoWorkers if no engine works. `abort`: requests that run
        are ended before.
        """
        async with self._updating:
            working = self._working()
            try:
                await self._order(working[:1], protocol.UpdateWeights(folder, "check"))
                await self._order(working[1:], protocol.UpdateWeights(folder, "check"))
                await self._order(self._working(), protocol.UpdateWeights(folder, "load", abort))
            except BaseException:
                for number in working:
                    self._notify(number, protocol.UpdateWeights(folder, "give_up"))
                raise
            self._table.forget_prefixes()

    def _working(self) -> list[int]:
        """The engines that work. Raises NoWorkers if none does."""
        if not (found := sorted(one.number for one in self._table.replicas.values() if one.works)):
            raise NoWorkers("no engine works now")
        return found

    async def _order(self, numbers: Sequence[int], order: protocol.UpdateWeights) -> None:
        """Give these engines an order of weights. Raises ValueError if one cannot follow it."""
        self._update_number += 1
        self._answers = dict.fromkeys(numbers)
        for number in numbers:
            self._notify(number, replace(order, number=self._update_number))
        await self.until(lambda one: self._answers.get(one.number, one) is not None)
        told = self._answers.items()
        changed = [number for number, found in told if order.kind == "load" and found and not found.problem]
        for number, found in told:
            said = found.problem if found else f"engine {number} has ended meanwhile; the log says why"
            if said and changed:
                said += f"; replicas {', '.join(map(str, changed))} have the new ones: order them again"
            if said:
                raise (WeightsTaken if found and found.is_taken else ValueError)(said)

    def note_updated(self, number: int, told: protocol.WeightsUpdated) -> None:
        """Take note that an engine has the weights that were ordered last, or why it has not."""
        if told.number == self._update_number:
            self._answers[number] = told
            self.notice()

    async def sleep(self, level: int, *, abort: bool = False) -> None:
        """Have all engines give weights and cache back, and wait until they have.

        They refuse requests at once, and first finish those that they have, or `abort` them.
        """
        self._table.forget_prefixes()
        self._sleep, self._awake = protocol.Sleep(level, abort), set(self._table.replicas)
        self.tell(self._sleep)
        await self.until(lambda one: one.number not in self._awake)
        self._awake.clear()

    async def wake(self) -> str:
        """Have all engines load the model again; -> why one of them cannot, or an empty text."""
        for one in self._table.replicas.values():
            one.slept = False
            if one.asleep:
                one.progress = protocol.Progress("start", 0.0)  # or an earlier failure would count
        self._awake.clear()
        self.tell(protocol.Sleep(0))
        await self.until(lambda one: not one.asleep or one.progress.phase == "asleep")
        return next((one.progress.detail for one in self._table.replicas.values() if one.asleep), "")

    def notice(self) -> None:
        """Look whether conditions are true for which somebody waits, because something has changed."""
        self.asleep = any(one.asleep for one in self._table.replicas.values())
        for condition, event in self._waiting:
            if condition():
                event.set()

    async def until(self, done: Callable[[Replica], bool]) -> None:
        """Wait until this is true of all engines that work."""
        event = asyncio.Event()
        waiter = (lambda: all(done(one) or not one.works for one in self._table.replicas.values())), event
        self._waiting.append(waiter)
        self.notice()
        try:
            await event.wait()
        finally:
            self._waiting.remove(waiter)
