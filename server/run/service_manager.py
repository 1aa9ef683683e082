"""Notices to the service manager that has started the server: that it is ready, that it lives, that it ends.

The protocol is systemd's: datagrams to a socket that a variable names. Without the variable nothing is sent.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)


class ServiceManager:
    def __init__(self, address: str, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`address` is that of its socket, empty if nobody asks for notices.

        `seconds`: it ends a server from which it hears nothing for so long; 0 if it does not.
        """
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._seconds = seconds
        self._clock = clock
        self._lived = -seconds

    def ready(self) -> None:
        self._send("READY=1\nSTATUS=Requests are served.")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=Running requests are finished.")

    def live(self) -> None:
        """Say that the server lives, if that is due. Call this several times in `seconds`."""
        if self._seconds and self._clock() >= self._lived + self._seconds / 3:
            self._lived = self._clock()
            self._send("WATCHDOG=1")

    def _send(self, notice: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(notice.encode(), self._address)
        except OSError as error:
            _log.warning("the service manager does not take notices: %s", error)
