"""The adapters of an engine in this process, which are loaded when a request first names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine_core.adapters.messages import AdapterState
from engine_core.engine import Engine
from server.errors import BadRequest
from server.offline.engine_requests import EngineRequest
from server.offline.lora_requests import WITHOUT_LORA, Adapters, LoRARequest, spread
from server.options.server_config import ServerConfig
from server.requests.adapted_models import is_current, read_named
from server.text.tokenizer import Tokenizer

T = TypeVar("T")

Conversation = tuple[list[dict[str, Any]], list[object]]
"""Messages, and their pictures."""


class ProgramAdapters:
    """The adapters of an engine in this process."""

    def __init__(self, engine: Engine, config: ServerConfig, tokenizer: Tokenizer) -> None:
        self._engine, self._config, self._tokenizer = engine, config, tokenizer
        self._states: dict[str, AdapterState] = {}

    def find(self, given: Adapters, count: int) -> list[AdapterState | None]:
        """Load what prompts name, and return the adapter of each. Raises BadRequest if one cannot be."""
        asked = spread(given, count)
        by_name: dict[str, LoRARequest] = {}
        for one in asked:
            if one is not None and by_name.setdefault(one.name, one).path != one.path:
                raise BadRequest(f"lora_request: two adapters have the name {one.name}", "lora_request")
        found = {name: self._use(one) for name, one in by_name.items()}
        return [None if one is None else found[one.name] for one in asked]

    def give(self, requests: Sequence[EngineRequest], given: Adapters) -> None:
        """Have requests computed by the adapters that are named for them. Raises BadRequest."""
        for request, state in zip(requests, self.find(given, len(requests)), strict=True):
            give_adapter([request], state)

    def with_templates(
        self, conversations: Sequence[Conversation], given: Adapters
    ) -> list[tuple[list[dict[str, Any]], list[object], str | None]]:
        """Conversations, and the templates of the adapters that are named for them; None: the model's."""
        states = self.find(given, len(conversations))
        own = [state and (state.adapter.chat_template or None) for state in states]
        return [(*each, template) for each, template in zip(conversations, own, strict=True)]

    def find_one(self, given: Adapters, count: int) -> AdapterState | None:
        """The only adapter of so many prompts that are compared."""
        states = self.find(given, count)
        if any(state != states[0] for state in states):
            raise BadRequest("texts are compared by one adapter: give one LoRARequest", "lora_request")
        return states[0] if states else None

    def _use(self, asked: LoRARequest) -> AdapterState:
        table = self._engine.adapters
        if table is None:
            raise BadRequest(WITHOUT_LORA.format(asked.name), "lora_request")
        try:
            known = self._states.get(asked.name)
            if known is not None and is_current(known.adapter, asked.path):
                return known
            adapter = read_named(asked.name, asked.path, self._config, self._tokenizer)
        except (ValueError, OSError) as error:
            raise BadRequest(str(error), "lora_request") from error
        table.load(adapter)
        state = AdapterState(adapter)  # if it has to wait for a place, that is all that is known of it
        while True:
            table.advance()
            for told in table.take_states():
                if told.adapter == adapter:
                    state = told
            if state.facts is not None or state.error or not table.is_loading:
                break
            table.wait()
        if state.error:
            raise BadRequest(f"lora_request: {asked.name} cannot be loaded: {state.error}", "lora_request")
        self._states[asked.name] = state
        return state


def give_adapter(requests: Sequence[EngineRequest], state: AdapterState | None) -> None:
    for request in requests:
        request.adapter = "" if state is None else state.adapter.digest


def by_adapter(
    states: Sequence[AdapterState | None], make: Callable[[list[int], AdapterState | None], list[T]]
) -> list[T]:
    """Call `make` for the indices of each adapter; what it returns for each index comes in their order."""
    groups: dict[str, list[int]] = {}
    for index, state in enumerate(states):
        groups.setdefault("" if state is None else state.adapter.digest, []).append(index)
    made: dict[int, T] = {}
    for indices in groups.values():
        made.update(zip(indices, make(indices, states[indices[0]]), strict=True))
    return [made[index] for index in range(len(states))]
