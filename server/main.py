"""The entry points of the commands `serve`, `facet` and `bench`.

Until the commands are imported, which takes a tenth of a second, Ctrl-C ends the process by the signal
itself, without a traceback. So this module imports next to nothing.
"""

from __future__ import annotations

import signal
import sys


def serve() -> None:
    _run("serve")


def main() -> None:
    _run("facet")


def bench() -> None:
    _run("bench")


def _run(command: str) -> None:
    """Run a command with the arguments of this process, and end with its exit code."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    if on_interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from server import commands  # imports much

    try:
        signal.signal(signal.SIGINT, on_interrupt)
        code = commands.run(command, sys.argv[1:])
    except KeyboardInterrupt:
        code = commands.INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    serve()
