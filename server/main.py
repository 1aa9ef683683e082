"""The entry points of the commands `serve`, `facet` and `bench`.

Until the commands are imported, which takes a tenth of a second, Ctrl-C ends the process by the signal
itself, without a traceback. So this module imports next to nothing.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys

_PACKAGES = ("server", "engine_core", "worker", "models")
_BAD_USAGE = 2


def serve() -> None:
    _run("serve")


def main() -> None:
    _run("facet")


def bench() -> None:
    _run("bench")


def _run(command: str) -> None:
    """Run a command with the arguments of this process, and end with its exit code."""
    if _homes() > 1:
        print(
            f"error: the packages {', '.join(_PACKAGES)} come from different places; run the installed "
            "command outside of folders that hold packages of these names, or set PYTHONSAFEPATH=1",
            file=sys.stderr,
        )
        sys.exit(_BAD_USAGE)
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from server.run import commands  # imports much

    try:
        signal.signal(signal.SIGINT, on_interrupt)
        code = commands.run(command, sys.argv[1:])
    except KeyboardInterrupt:
        code = commands.INTERRUPTED
    sys.exit(code)


def _homes() -> int:
    """The number of folders in which our packages are found: another one may have one of such a name."""
    found = map(importlib.util.find_spec, _PACKAGES)
    return len({os.path.dirname(os.path.dirname(spec.origin or "")) if spec else "" for spec in found})


if __name__ == "__main__":
    serve()
