"""The adapters of all engines of a model, as one API server knows them by what engines tell."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from engine_core.adapters.messages import Adapter, AdapterState, DropAdapter, LoadAdapter
from engine_core.client.replica import Replica
from engine_core.protocol import Request


class EngineAdapters:
    """A name means what engines told last. Requests say the digest, so none gets another adapter's answer."""

    def __init__(
        self,
        notify: Callable[[int, Request], None],
        until: Callable[[Callable[[Replica], bool]], Awaitable[None]],
        tell: Callable[[Request], None],
    ) -> None:
        """`notify` and `tell` send to one engine and to all; `until` waits until all do something."""
        self._notify, self._until, self._tell = notify, until, tell
        self.states: dict[str, AdapterState] = {}
        """The adapters that can be used, by their names."""
        self._ordered: Adapter | None = None
        """The adapter that was ordered last."""
        self._dropped: dict[str, int] = {}
        """Name -> when it was dropped here last."""
        self._heard: dict[int, AdapterState] = {}
        """What each engine has told of it first since then."""

    async def load(self, adapter: Adapter) -> str | None:
        """Have all engines load an adapter; returns why one of them cannot, or an empty text. Then the name
        means what it did before. None: no engine works that could load it."""
        before, adapter = self.states.get(adapter.name), self._now(adapter)
        self._ordered, self._heard = adapter, {}
        self._tell(LoadAdapter(adapter))
        await self._until(lambda one: one.number in self._heard)
        if not self._heard:
            return None
        error = next((state.error for state in self._heard.values() if state.error), "")
        if error and before is not None:
            self._tell(LoadAdapter(self._now(before.adapter), before.facts))
        elif error:
            await self.drop(adapter.name)
        return error

    def _now(self, adapter: Adapter) -> Adapter:
        return replace(adapter, ordered=self._time_of_order(adapter.name))

    def _time_of_order(self, name: str) -> int:
        """The time of an order that is given now, which is later than all before, whatever the clock says."""
        known = self.states.get(name)
        return max(time.time_ns(), self._dropped.get(name, 0) + 1, known.adapter.ordered + 1 if known else 0)

    async def drop(self, name: str) -> None:
        """Have a name mean nothing any more. Requests that run go on."""
        self._dropped[name] = self._time_of_order(name)
        self.states.pop(name, None)
        self._tell(DropAdapter(name, self._dropped[name]))

    def receive(self, replica: Replica, state: AdapterState) -> None:
        name, known = state.adapter.name, self.states.get(state.adapter.name)
        if state.adapter == self._ordered:
            self._heard.setdefault(replica.number, state)
        if state.facts is None:
            if known is not None and known.adapter == state.adapter:
                del self.states[name]
        elif state.adapter.ordered < self._dropped.get(name, 0):
            self._notify(replica.number, DropAdapter(name, self._dropped[name]))  # another server restored it
        elif known is None or known.adapter.ordered <= state.adapter.ordered:
            self.states[name] = state

    def welcome(self, replica: Replica) -> None:
        """Tell an engine that has started what all others have."""
        for state in self.states.values():
            self._notify(replica.number, LoadAdapter(state.adapter, state.facts))
