"""`facet run`: a server of its own, a chat with it on a pretended terminal, and the end of both."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl

import pytest

from server.run.commands import run
from server.terminal import chat
from server.terminal.own_server import OwnServer
from server.terminal.server_client import ServerClient, Unreachable

COMMAND = [sys.executable, "-P", "-m", "facet", "run", "demo"]
SMALL = ["--dtype", "float32", "--kv-cache-memory-bytes", "64M"]


def test_options_of_the_chat_are_kept_and_others_go_to_the_server(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []

    class Ready(OwnServer):
        def __init__(self) -> None:
            self.url = url

        def wait_until_ready(self) -> None:
            started.append("ready")

    @contextmanager
    def server(*given: object) -> Iterator[OwnServer]:
        started.append(given)
        yield Ready()

    monkeypatch.setattr(chat, "own_server", server)
    words = [
        "org/tiny",
        "--max-model-len",
        "8k",
        "--max-tokens",
        "5",
        "-q",
        "hi",
        "--port",
        "4711",
        "--api-key",
        "k",
    ]
    assert run("facet", ["run", *words]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert started == [(["org/tiny", "--max-model-len", "8k", "--api-key", "k"], 4711), "ready"]


@pytest.mark.slow
def test_ctrl_c_leaves_the_server_and_the_end_of_the_chat_ends_it() -> None:
    screen, terminal = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *SMALL],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),  # or Ctrl-C would be no signal
    ) as process:
        os.close(terminal)
        try:
            shown = until(screen, "> ")
            [url] = re.findall(r"http://127\.0\.0\.1:\d+", shown)
            assert "Ctrl-D leaves" in interrupted(screen)
            os.write(screen, b"What is the capital of France?\n")
            assert "Paris" in until(screen, "> ")
            os.write(screen, b"\x04")
            assert process.wait(60) == 0
        finally:
            process.terminate()  # or a test that fails would wait for it
    os.close(screen)
    with ServerClient(url) as server, pytest.raises(Unreachable):
        server.get("/health")


def interrupted(screen: int) -> str:
    """All that is shown after Ctrl-C.

    Python notices a signal that comes between its prompt and its wait for keys with the next key only.
    """
    shown = ""
    for _ in range(30):
        os.write(screen, b"\x03")
        while select.select([screen], [], [], 1)[0]:
            shown += os.read(screen, 4096).decode()
            if shown.endswith("> "):
                return shown
    raise AssertionError(shown)


def until(screen: int, end: str) -> str:
    """All that is shown until it ends so."""
    shown = ""
    while not shown.endswith(end):
        shown += os.read(screen, 4096).decode()
    return shown
