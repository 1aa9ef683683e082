"""What is checked before a body is read: that there is a model, a place in it, and the right to use it."""

from __future__ import annotations

from fastapi import Depends
from starlette.requests import Request

from server.access.request_state import begin_request, caller_of, header_of, require_right, state_of
from server.errors import BadRequest
from server.reading.endpoint_table import ModelEndpoint


class NotJson(BadRequest):
    type = "Bad Request"


def check_entry(request: Request, row: ModelEndpoint) -> None:
    """Refuses a request to an endpoint of the table, by its head alone."""
    state = state_of(request.scope)
    frontend = state.frontend
    frontend.require_ready()
    if row.asks_engine:
        if state.admission is None:  # or it has got a place already
            frontend.admissions.check_room(caller_of(request))
        begin_request(request)
    if row.needs_json:
        check_json(request)
    if row.use is not None:
        require_right(request, *row.use.rights)
        row.use.require(frontend.facts)


def check_json(request: Request) -> None:
    kind = header_of(request, b"content-type") or ""
    if kind == "application/json":
        return
    kind = kind.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise NotJson("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")


async def require_ready(request: Request) -> None:
    """Refuses every request with 503 while the model loads, whatever is wrong with the body."""
    state_of(request.scope).frontend.require_ready()


async def require_json(request: Request) -> None:
    check_json(request)


ENTRY = [Depends(require_ready), Depends(require_json)]
"""Checks of an endpoint with a body that is not in the table."""
