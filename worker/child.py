"""Child processes that end when their parent does, and whose end the parent notices.

One socket pair joins parent and child. The parent sends the child's configuration through it; from then on
nothing is sent, and the end of either process shows as end-of-file at the other: the child exits at once when
its parent is gone, and the parent waits for the child with any poll. The standard multiprocessing module is
not used because it pickles.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

STOPPED, BROKE, CANNOT_START = 0, 1, 2
"""Exit codes: ended as it was asked to, broke while it worked, could not start. With the last two, a process
has printed the reason."""

_LENGTH_BYTES = 8
_PR_SET_PDEATHSIG = 1


class Child:
    """A running process. It ends when this object is collected."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], lifeline: socket.socket) -> None:
        self.name = name
        self._process = process
        self.sentinel = lifeline.detach()
        """A descriptor that becomes readable when the process has ended, and stays so."""
        weakref.finalize(self, os.close, self.sentinel)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while the process runs, negative for the signal that ended it."""
        return self._process.poll()

    def ended_within(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self.sentinel, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def wait(self) -> int:
        return self._process.wait()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def stop(self, seconds: float) -> int:
        """Ask the process to end, and kill it if it has not after `seconds`."""
        self.terminate()
        if not self.ended_within(seconds):
            self.kill()
        return self.wait()


def start(name: str, module: str, payload: bytes, inherit: Sequence[int] = ()) -> Child:
    """Run `python -m module FD`, whose main() calls adopt(FD) first. `inherit`: descriptors that it gets too.

    Call this from a thread that lives as long as the child may: Linux ends the child with that thread.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *inherit],
            stdin=subprocess.DEVNULL,
            process_group=0,  # a Ctrl-C at the terminal reaches the parent alone, which decides what follows
        )
    with suppress(BrokenPipeError, ConnectionResetError):  # it is dead already, as the sentinel shows
        ours.sendall(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
    return Child(name, process, ours)


def adopt(fd: int) -> bytes:
    """Tie this process's life to its parent's, and return the payload. The child calls this first."""
    os.set_inheritable(fd, False)
    lifeline = socket.socket(fileno=fd)
    _die_with_parent()
    payload = _read(lifeline, int.from_bytes(_read(lifeline, _LENGTH_BYTES), "little"))
    threading.Thread(target=_leave_at_end_of_file, args=(lifeline,), name="lifeline", daemon=True).start()
    return payload


def describe_exit(code: int) -> str:
    """A clause on how a process ended that sent no reason; a negative code is a signal."""
    if code in (BROKE, CANNOT_START):
        return f"it exited with code {code}, and its log says why"
    if code >= 0:
        return f"it exited with code {code} and did not say why"
    known = {each.value: each.name for each in signal.Signals}
    name = known.get(-code, f"signal {-code}")  # most real-time signals have no name
    return f"it was ended by {name}" + (" (is memory short? `dmesg` tells)" if name == "SIGKILL" else "")


def _die_with_parent() -> None:
    """Have Linux end this process even while it holds the interpreter's lock; elsewhere a thread does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(lifeline: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = lifeline.recv(count - len(data))
        if not part:
            raise SystemExit("the parent process ended before it had sent the configuration")
        data += part
    return bytes(data)


def _leave_at_end_of_file(lifeline: socket.socket) -> None:
    lifeline.recv(1)
    os._exit(1)
