"""A server that a command starts for itself, at a Unix socket or a port of this machine, and then ends."""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from server.terminal.progress_bar import ProgressDisplay
from server.terminal.server_client import Reply, ServerClient, ServerError, Unreachable
from worker.logs import last_error

_SECONDS_BETWEEN_LOOKS = 0.05
_PR_SET_PDEATHSIG = 1
_LOOPBACK = "127.0.0.1"


class OwnServer:
    """A process of `serve` that may still be starting."""

    def __init__(self, client: ServerClient, process: subprocess.Popen[bytes], log: TextIO) -> None:
        self.url = client.url
        self._client, self._process, self._log = client, process, log

    def ask(self, method: str, path: str, body: object = None) -> Reply | None:
        """Any answer; None if there is none yet. Raises ServerError if the server has ended."""
        if (code := self._process.poll()) is not None:
            self._log.seek(0)
            printed = self._log.read().strip() or f"exit code {code}"
            raise ServerError(f"the server ended: {last_error(printed) or printed.splitlines()[-1]}")
        try:
            return self._client.send(method, path, None if body is None else json.dumps(body).encode())
        except Unreachable:
            return None

    def wait_until_ready(self) -> None:
        """Shows how far the start is, and returns when it is done."""
        display = ProgressDisplay()
        try:
            while (reply := self.ask("GET", "/health")) is None or reply.status != 200:
                state = None if reply is None else reply.value()
                if isinstance(state, dict) and state.get("state") == "loading":
                    display.show(state["stage"], state["progress"])
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        finally:
            display.done()


@contextmanager
def own_server(serve_options: Sequence[str], port: int | None = None) -> Iterator[OwnServer]:
    """Starts `serve` with these options, and ends it with the block.

    It listens at a Unix socket, or at a port of this machine: 0 stands for any that is free.
    """
    with tempfile.TemporaryDirectory(prefix="facet-") as folder, tempfile.TemporaryFile("w+") as log:
        url = f"unix:{folder}/socket" if port is None else f"http://{_LOOPBACK}:{port or _free_port()}"
        place = (
            ["--uds", url[5:]] if port is None else ["--host", _LOOPBACK, "--port", url.rpartition(":")[2]]
        )
        command = [sys.executable, "-P", "-m", "server.main", *serve_options]
        process = subprocess.Popen(
            [*command, *place, "--disable-uvicorn-access-log"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_end_with_parent,
            process_group=0,  # Ctrl-C is the command's matter: in a chat it stops an answer
        )
        try:
            with ServerClient(url) as client:
                yield OwnServer(client, process, log)
        finally:
            process.terminate()
            process.wait()


def _free_port() -> int:
    with socket.create_server((_LOOPBACK, 0)) as probe:
        return probe.getsockname()[1]


def _end_with_parent() -> None:
    """Have the kernel end the server if this command is killed, so that no model stays in memory unseen."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # only Linux has it
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
