"""Logging of any process of Facet: one handler, one line format. Only this module touches handlers.

Every floor uses it, so it imports no torch.
"""

from __future__ import annotations

import logging
import sys

FLOORS = ("server", "engine_core", "worker", "models")
LEVELS = ("debug", "info", "warning", "error", "critical")


def setup(process: str, level: str) -> None:
    """Send this process's records to stderr. `level` is for our own code; libraries only warn."""
    if level.lower() not in LEVELS:
        raise ValueError(f"unknown log level {level!r}: choose one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)-7s {process}: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for floor in FLOORS:
        logging.getLogger(floor).setLevel(level.upper())


def one_line(error: BaseException) -> str:
    """The text of an error in one line, with the type of one that was not foreseen."""
    text = " ".join(str(error).split())
    return text if isinstance(error, (ValueError, OSError)) and text else f"{type(error).__name__}: {text}"
