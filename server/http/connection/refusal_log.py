"""The lines of the access log on connections that end with a refusal, of which a crowd makes few."""

from __future__ import annotations

import logging
from collections.abc import Callable

MOST_LINES = 20
"""Refusals of one second that have a line of their own. A line costs as much as the refusal itself."""
SECONDS = 1.0

Client = tuple[str, int] | None


class RefusalLog:
    """Logs refusals; those of a second beyond MOST_LINES have one line together, with their number."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._call_later = call_later
        self._lines = self._untold = 0
        self._logger = logging.getLogger("uvicorn.access")

    def tell(self, client: Client, status: int, message: str) -> None:
        """Log that a client was refused with this status and message."""
        if self._lines == MOST_LINES:
            self._untold += 1
            return
        if not self._lines:
            self._call_later(SECONDS, self._end_second)
        self._lines += 1
        host, port = client or ("unix", 0)
        self._logger.info("%s:%d - connection ended; %d: %s", host, port, status, message)

    def _end_second(self) -> None:
        self._lines, untold, self._untold = 0, self._untold, 0
        if untold:
            self._logger.info("%d more connections ended with refusals within a second", untold)
