"""A server for one command alone: started here, reached by a Unix socket, ended with the command."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from server.run.progress import ProgressDisplay
from server.terminal.connection import Server, ServerError, Unreachable

_PAUSE = 0.05
_PR_SET_PDEATHSIG = 1


@contextmanager
def own_server(serve_options: Sequence[str]) -> Iterator[str]:
    """Starts `serve` with these options; yields its URL once it is ready. Raises ServerError if it ends."""
    with tempfile.TemporaryDirectory(prefix="facet-") as folder, tempfile.TemporaryFile("w+") as log:
        url = f"unix:{Path(folder) / 'socket'}"
        command = [sys.executable, "-P", "-m", "server.main", *serve_options]
        extra = ["--uds", url.removeprefix("unix:"), "--disable-uvicorn-access-log"]
        process = subprocess.Popen(
            [*command, *extra],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_end_with_parent,
        )
        try:
            with Server(url) as server:
                _wait_ready(server, process, log)
            yield url
        finally:
            process.terminate()
            process.wait()


def _end_with_parent() -> None:
    """Have the kernel end the server if this command is killed, so that no model stays in memory unseen."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # only Linux has it
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(server: Server, process: subprocess.Popen[bytes], log: TextIO) -> None:
    display = ProgressDisplay()
    while process.poll() is None:
        try:
            reply = server.send("GET", "/health")
        except Unreachable:
            time.sleep(_PAUSE)
            continue
        if reply.status == 200:
            display.done()
            return
        state = reply.value()
        if isinstance(state, dict) and state.get("state") == "loading":
            display.show(state["stage"], state["progress"])
        time.sleep(_PAUSE)
    display.done()
    log.seek(0)
    lines = log.read().strip().splitlines() or [f"exit code {process.returncode}"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raise ServerError(f"the server ended: {(errors or lines)[-1]}")
