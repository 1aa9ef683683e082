"""How the programs of this folder end: with a code, and errors that explain themselves in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from server.options.option_parsing import OptionError
from server.terminal.console import CommandError


def run_program(run: Callable[[Sequence[str], str], int], name: str) -> int:
    try:
        return run(sys.argv[1:], name)
    except (OptionError, CommandError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
