"""`facet load` and `facet unload`: have a server of several models load one, or give its memory back."""

from __future__ import annotations

from collections.abc import Sequence

from server.terminal.console import parser_of, safe_text
from server.terminal.server_client import add_server_flags, client_of


def run(arguments: Sequence[str], command: str) -> int:
    loads = command.endswith(" load")
    what = "Load a model, so that it answers at once." if loads else "Have a model give its memory back."
    parser = parser_of(command, what)
    parser.add_argument("name", metavar="MODEL", help="Its name or an alias.")
    if loads:
        parser.add_argument("--alias", help="A name that means it from then on, for all requests to come.")
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
