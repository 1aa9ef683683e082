"""`facet models`: the models of a running server and what they can do, or how far it is with loading."""

from __future__ import annotations

import json
from collections.abc import Sequence

from server.terminal.console import columns, parser_of, safe_text
from server.terminal.server_client import ServerClient, ServerError, add_server_flags, client_of


def run(arguments: Sequence[str], command: str) -> int:
    parser = parser_of(command, "List the models of a running server and their tasks.")
    add_server_flags(parser, model=False)
    parser.add_argument("--json", action="store_true", help="Print the server's own answer.")
    given = parser.parse_args(arguments)
    with client_of(given) as server:
        _check_loaded(server)
        answer = server.get("/v1/models")
    if given.json:
        print(json.dumps(answer, indent=2))
        return 0
    rows = [("name", "longest", "tasks")]
    for card in answer["data"]:
        rows.append((card["id"], str(card.get("max_model_len", "?")), ", ".join(card.get("tasks", ["?"]))))
    print("\n".join(map(safe_text, columns(rows))))
    return 0


def _check_loaded(server: ServerClient) -> None:
    """Raises ServerError with the stage of loading, if the server is not ready."""
    reply = server.send("GET", "/health")
    state = reply.value()
    if reply.status == 503 and isinstance(state, dict) and state.get("state") == "loading":
        raise ServerError(
            f"{server.url} is still loading: {state['stage']}, {state['progress']:.0%} after "
            f"{state['elapsed_s']:.0f} s"
        )
