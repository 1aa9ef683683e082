"""The commands that talk to a server, or look at this machine: each is imported only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from server.options.option_table import OptionError
from server.terminal.connection import ServerError

BAD_USAGE, FAILED, INTERRUPTED = 2, 1, 130

MODULES = {
    "chat": "server.terminal.talking",
    "complete": "server.terminal.talking",
    "embed": "server.terminal.embed",
    "models": "server.terminal.models",
    "run-batch": "server.terminal.run_batch",
    "doctor": "server.terminal.doctor",
    "kernels": "server.terminal.kernels",
    "collect-env": "server.terminal.doctor",
}


def run(name: str, arguments: Sequence[str], api_key: str | None) -> int:
    """Runs a command of `MODULES`; `api_key` is sent to the server unless the arguments bring another."""
    try:
        return import_module(MODULES[name]).run(arguments, f"facet {name}", api_key)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
