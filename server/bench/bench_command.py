"""The command `facet bench`, or `bench`: hands over to one of its benchmarks, and imports only that one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from server.bench.serve_options import BenchError
from server.options.option_table import OptionError

BAD_USAGE = 2

USAGE = """usage: {command} serve [options]                    load on a server that runs
       {command} startup [MODEL] [serve options]    from start to the first token
       {command} offline [MODEL] [serve options]    the engine in this process, without HTTP
       {command} serve|startup|offline --help
"""


def run(arguments: Sequence[str], command: str) -> int:
    match arguments:
        case [("serve" | "startup" | "offline") as name, *rest]:
            module = import_module(f"server.bench.{name}")
        case ["--help" | "-h"]:
            print(USAGE.format(command=command), end="")
            return 0
        case _:
            print(USAGE.format(command=command), end="", file=sys.stderr)
            return BAD_USAGE
    try:
        return module.run(rest, f"{command} {name}")
    except (OptionError, BenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        return 130
