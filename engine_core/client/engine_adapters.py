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
        self._heard: dict[tuple[int, str], AdapterState] = {}
        """What each engine has told last of each name."""

    async def load(self, adapter: Adapter) -> str:
        """Have all engines load an adapter; returns why one of them cannot, or an empty text."""
        for key in [key for key in self._heard if key[1] == adapter.name]:
            del self._heard[key]
        self._tell(LoadAdapter(adapter))
        await self._until(lambda one: self._has_told(one, adapter))
        told = [state for (_, name), state in self._heard.items() if name == adapter.name]
        if error := next((state.error for state in told if state.error), ""):
            self._tell(DropAdapter(adapter.name))
            self.states.pop(adapter.name, None)
        return error

    def _has_told(self, replica: Replica, adapter: Adapter) -> bool:
        state = self._heard.get((replica.number, adapter.name))
        return state is not None and state.adapter.digest == adapter.digest

    async def drop(self, name: str) -> None:
        """Have a name mean nothing any more. Requests that run go on."""
        self.states.pop(name, None)
        self._tell(DropAdapter(name))

    def receive(self, replica: Replica, state: AdapterState) -> None:
        name = state.adapter.name
        self._heard[replica.number, name] = state
        if state.facts is not None:
            self.states[name] = state
        elif (known := self.states.get(name)) is not None and known.adapter.digest == state.adapter.digest:
            del self.states[name]

    def welcome(self, replica: Replica) -> None:
        """Tell an engine that has started what all others have."""
        for state in self.states.values():
            self._notify(replica.number, LoadAdapter(state.adapter, state.facts))
