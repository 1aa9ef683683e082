"""The adapters of all engines of a model, as one API server knows them by what engines tell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

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
        self._heard: dict[int, AdapterState] = {}
        """What each engine has told of it first since then."""

    async def load(self, adapter: Adapter) -> str | None:
        """Have all engines load an adapter; returns why one of them cannot, or an empty text. Then the name
        means what it did before. None: no engine works that could load it."""
        before = self.states.get(adapter.name)
        self._ordered, self._heard = adapter, {}
        self._tell(LoadAdapter(adapter))
        await self._until(lambda one: one.number in self._heard)
        if not self._heard:
            return None
        error = next((state.error for state in self._heard.values() if state.error), "")
        if error and before is not None:
            self._tell(LoadAdapter(before.adapter, before.facts))
        elif error:
            await self.drop(adapter.name)
        return error

    async def drop(self, name: str) -> None:
        """Have a name mean nothing any more. Requests that run go on."""
        self.states.pop(name, None)
        self._tell(DropAdapter(name))

    def receive(self, replica: Replica, state: AdapterState) -> None:
        name, digest, ordered = state.adapter.name, state.adapter.digest, self._ordered
        if ordered is not None and (ordered.name, ordered.digest) == (name, digest):
            self._heard.setdefault(replica.number, state)
        if state.facts is not None:
            self.states[name] = state
        elif (known := self.states.get(name)) is not None and known.adapter.digest == digest:
            del self.states[name]

    def welcome(self, replica: Replica) -> None:
        """Tell an engine that has started what all others have."""
        for state in self.states.values():
            self._notify(replica.number, LoadAdapter(state.adapter, state.facts))
