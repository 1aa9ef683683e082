"""Tells clients, in headers of answers, what of their requests has no effect."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fastapi import Response

from server.schemas.unknown_fields import FieldNotes

log = logging.getLogger(__name__)

_MOST_CLIENTS, _MOST_FIELDS = 1024, 16
"""The most clients that are remembered, and the most fields of each that the log names."""
_logged: dict[str, set[str]] = {}
"""The unknown fields of each client that the log has named; of too many clients the last ones."""


def with_warnings(response: Response, warnings: Iterable[str]) -> Response:
    """The answer, with headers that say what of the request has no effect."""
    for warning in warnings:
        response.headers.append("Warning", f'299 - "{_printable(warning)}"')
    return response


def tell_unknown(response: Response, notes: FieldNotes, client: str) -> None:
    """Names a request's unknown fields in a header of its answer and, for each client once, in the log."""
    with_warnings(response, [notes.warning])
    if client not in _logged and len(_logged) == _MOST_CLIENTS:
        del _logged[next(iter(_logged))]
    logged = _logged.setdefault(client, set())
    new = [name for name in notes.foreign if name not in logged][: _MOST_FIELDS - len(logged)]
    if new:
        logged.update(new)
        log.info("%s sends fields that have no effect here: %s", client, _printable(", ".join(new)))


def _printable(text: str) -> str:
    """What a header may hold of a text that a client may have written."""
    return "".join(char if " " <= char <= "~" and char not in '"\\' else "?" for char in text)[:500]
