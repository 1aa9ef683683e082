"""Decides at the head of a request whether it may get in: a full server then spends nothing else on it."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import Scope

from server.access.access import Access
from server.access.admission import Admissions
from server.errors import ApiError


class Door:
    """Takes one place for each request that the engine will compute, or refuses it if there is none.

    The place is in `scope["admission"]`, and is given back when the request ends.
    """

    def __init__(self, admissions: Admissions, paths: Collection[str], access: Access) -> None:
        """`paths` are those of the endpoints that ask the engine."""
        self._admissions = admissions
        self._paths = frozenset(path.encode() for path in paths)
        self._access = access

    def enter(self, method: bytes, url: bytes, scope: Scope) -> ApiError | None:
        """Returns the reason for which a request is refused, if it is."""
        if method != b"POST" or url not in self._paths or not self._admissions.slots:
            return None  # also for a path with a query: such a line may still turn out to be malformed
        caller = self._access.enter(scope)
        if caller is None:
            return None  # its key is not valid; or a proxy is before it, and it will be known later who it is
        try:
            admission = self._admissions.take_free_place(caller)
        except ApiError as error:
            return error
        if admission is not None:
            scope["admission"] = admission
        return None
