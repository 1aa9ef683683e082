"""`facet models`, `load` and `unload`: the models of a running server, or how far it is with loading."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.terminal import suggestions
from server.terminal.console import columns, parser_of, safe_text
from server.terminal.server_client import ServerClient, ServerError, add_server_flags, client_of


def run(arguments: Sequence[str], command: str) -> int:
    if command.endswith("load"):
        return _load_or_unload(arguments, command)
    parser = parser_of(command, "List the models of a running server and their tasks.")
    add_server_flags(parser, model=False)
    parser.add_argument("--json", action="store_true", help="Print the server's own answer.")
    parser.add_argument("--suggest", action="store_true", help="Name models that fit this machine instead.")
    given = parser.parse_args(arguments)
    if given.suggest:
        print("\n".join(suggestions.show()))
        return 0
    with client_of(given) as server:
        _check_loaded(server)
        answer = server.get("/v1/models")
    if given.json:
        print(json.dumps(answer, indent=2))
        return 0
    rows = [("name", "context length", "tasks")]
    for card in answer["data"]:
        longest = card.get("max_model_len") or "?"
        rows.append((card["id"], str(longest), ", ".join(card.get("tasks", ["?"])) or "?"))
    if any("state" in card for card in answer["data"]):  # it has several
        more = [("state", "memory", ""), *map(_of_several, answer["data"])]
        rows = [(*row, *added) for row, added in zip(rows, more, strict=True)]
    print("\n".join(map(safe_text, columns(rows))))
    return 0


def _of_several(card: dict[str, Any]) -> tuple[str, str, str]:
    """The state of one of several models, the memory that it takes or took, and what else there is to say."""
    alias = f"alias of {card['model']}" if card["model"] != card["id"] else ""
    if parent := card.get("parent"):
        return card["state"], "", f"adapter of {parent}"
    memory = f"{card['memory'] >> 20} MiB" if card["memory"] else "?"
    return card["state"], memory, alias


def _check_loaded(server: ServerClient) -> None:
    """Raises ServerError with the stage of loading, if the server is not ready."""
    reply = server.send("GET", "/health")
    state = reply.value()
    if reply.status == 503 and isinstance(state, dict) and state.get("state") == "loading":
        raise ServerError(
            f"{server.url} is still loading: {state['stage']}, {state['progress']:.0%} after "
            f"{state['elapsed_s']:.0f} s"
        )


def _load_or_unload(arguments: Sequence[str], command: str) -> int:
    """Has a server of several models load one, or give its memory back."""
    loads = command.endswith(" load")
    what = "Load a model, so that it answers at once." if loads else "Unload a model, to free its memory."
    parser = parser_of(command, what)
    parser.add_argument("name", metavar="MODEL", help="Its name or an alias.")
    if loads:
        parser.add_argument("--alias", help="Another name for it, from now on.")
    add_server_flags(parser, model=False)
    given = parser.parse_args(arguments)
    body = {"model": given.name}
    if loads and given.alias:
        body["alias"] = given.alias
    with client_of(given) as server:
        answer = server.post(f"/models/{'load' if loads else 'unload'}", body)
    taken = f", up to {answer['memory'] >> 20} MiB" if loads else ""
    print(safe_text(f"{answer['model']} is {answer['state']}{taken}"))
    return 0
