"""`facet models`: the models of a running server and what they can do, or how far it is with loading."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.terminal.connection import Server, ServerError
from server.terminal.screen import safe
from server.terminal.server_flags import add_server_flags, parser_of, server_of

_NOT_READY = 503


def run(arguments: Sequence[str], command: str, api_key: str | None) -> int:
    parser = parser_of(command, "List the models of a running server and their tasks.")
    add_server_flags(parser, model=False)
    parser.add_argument("--json", action="store_true", help="Print the server's own answer.")
    given = parser.parse_args(arguments)
    with server_of(given, api_key) as server:
        _check_state(server)
        answer = server.get("/v1/models")
    if given.json:
        print(json.dumps(answer, indent=2))
        return 0
    rows = [("name", "longest", "tasks"), *(_row(card) for card in answer["data"])]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print(safe("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()))
    return 0


def _check_state(server: Server) -> None:
    """Raises ServerError with the stage of loading, if the server is not ready."""
    reply = server.send("GET", "/health")
    state = reply.value()
    if reply.status == _NOT_READY and isinstance(state, dict) and state.get("state") == "loading":
        raise ServerError(
            f"{server.url} is still loading: {state['stage']}, {state['progress']:.0%} after "
            f"{state['elapsed_s']:.0f} s"
        )


def _row(card: dict[str, Any]) -> tuple[str, str, str]:
    return card["id"], str(card.get("max_model_len", "?")), ", ".join(card.get("tasks", ["?"]))
