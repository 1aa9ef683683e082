"""The ids of the requests that are in the server, by which they can be ended."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

R = TypeVar("R")


class RequestsById(Generic[R]):
    """Finds requests by their ids. Programs that use the engine directly may give several the same id."""

    def __init__(self) -> None:
        self._found: dict[str, list[R]] = {}

    def free(self, id: str) -> str:
        """This id if no request has it, or else this id with a random end."""
        found = id
        while found in self._found:
            found = f"{id}-{secrets.token_hex(4)}"
        return found

    def put(self, id: str, request: R) -> None:
        self._found.setdefault(id, []).append(request)

    def drop(self, id: str, request: R) -> None:
        same = self._found[id]
        same.remove(request)
        if not same:
            del self._found[id]

    def all(self) -> Iterator[R]:
        """All requests, those that came first before others."""
        for same in self._found.values():
            yield from same

    def find(self, ids: Iterable[str]) -> Iterator[R]:
        for id in ids:
            yield from self._found.get(id, ())
