"""Child processes that end when their parent does, and whose end the parent notices.

One socket pair joins them. The parent sends the child's configuration through it, and may send messages
later; the child sends nothing. The end of either shows as end-of-file at the other: the child exits at once,
and the parent waits with any poll. The standard multiprocessing module is not used because it pickles.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO, Protocol

from worker import logs

STOPPED, BROKE, CANNOT_START, LEFT_ALONE = 0, 1, 2, 3
"""Exit codes: ended as it was asked to, broke while it worked, could not start, or ended because an engine
has ended with which it shares experts. With all but the first, a process has printed the reason."""

DUMP_STACKS = signal.SIGUSR1
"""The signal at which a child writes the stacks of all its threads to stderr, whatever they do."""

LENGTH_BYTES = 8
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger(__name__)


class Process(Protocol):
    """A process as `Child` calls it: a `Popen`, or one that was forked elsewhere."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, sig: int, /) -> None: ...


class Child:
    """A running process. It ends when this object is collected."""

    def __init__(self, name: str, process: Process, lifeline: socket.socket) -> None:
        self.name = name
        self._process = process
        self._lifeline = lifeline
        self.sentinel = lifeline.fileno()
        """A descriptor that becomes readable when the process has ended, and stays so."""
        self.killed_because = ""
        """The reason why this parent kills it, for the log, if it does so on its own account."""
        weakref.finalize(self, lifeline.close)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while the process runs, negative for the signal that ended it."""
        return self._process.poll()

    def tell(self, message: bytes) -> None:
        """Send a message without waiting. A process that leaves hundreds of them unread is killed."""
        frame = framed(message)
        try:
            sent = self._lifeline.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            return
        if sent < len(frame):
            self.kill()

    def ended_within(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self.sentinel, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def wait(self) -> int:
        return self._process.wait()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def stop(self, seconds: float) -> int:
        """Ask the process to end, and kill it if it has not after `seconds`."""
        self.terminate()
        if not self.ended_within(seconds):
            self.kill()
        return self.wait()


class Start(Protocol):
    """A way to start a child that needs no descriptors: `start`, or that of a fork server."""

    def __call__(self, name: str, module: str, payload: bytes, /) -> Child: ...


def start(
    name: str,
    module: str,
    payload: bytes,
    inherit: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Run `python -m module FD`, which calls adopt(FD). Linux ends it with the thread that calls this.

    `environment` takes the place of this process's own variables.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *inherit],
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # a Ctrl-C at the terminal reaches the parent alone, which decides what follows
        )
    return child_of(name, process, ours, payload)


def child_of(name: str, process: Process, lifeline: socket.socket, payload: bytes) -> Child:
    """A process that calls adopt() on the other end of this socket, and has now been sent its payload."""
    with suppress(BrokenPipeError, ConnectionResetError):  # it is dead already, as the sentinel shows
        lifeline.sendall(framed(payload))
    return Child(name, process, lifeline)


def adopt(fd: int, on_message: Callable[[bytes], None] = lambda _: None) -> bytes:
    """Tie this process's life to its parent's, and return the payload. The child calls this first.

    From then on it also ends when one of its threads breaks. `on_message` gets the parent's later messages,
    in a thread of its own.
    """
    lifeline, payload = attach(fd)
    threading.excepthook = _end_with_thread
    threading.Thread(target=_listen, args=(lifeline, on_message), name="lifeline", daemon=True).start()
    return payload


def attach(fd: int) -> tuple[BinaryIO, bytes]:
    """The parent's end of the lifeline, and the payload. Linux ends this process with its parent from now on.

    No thread is started: a process that only forks has to see the lifeline's end by itself.
    """
    os.set_inheritable(fd, False)
    lifeline = socket.socket(fileno=fd).makefile("rb")
    _die_with_parent()
    if sys.stderr is not None:
        faulthandler.register(DUMP_STACKS)
    payload = read_frame(lifeline)
    if payload is None:
        raise SystemExit("the parent process ended before it had sent the configuration")
    return lifeline, payload


def describe_exit(code: int) -> str:
    """A clause on how a process ended that sent no reason; a negative code is a signal."""
    if code in (BROKE, CANNOT_START, LEFT_ALONE):
        return f"it exited with code {code}, and its log says why"
    if code >= 0:
        return f"it exited with code {code} and did not say why"
    known = {each.value: each.name for each in signal.Signals}
    name = known.get(-code, f"signal {-code}")  # most real-time signals have no name
    hint = ", most likely because memory ran out (`dmesg` tells)" if name == "SIGKILL" else ""
    return f"it was ended by {name}{hint}"


def _die_with_parent() -> None:
    """Have Linux end this process even while it holds the interpreter's lock; elsewhere a thread does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def framed(message: bytes) -> bytes:
    """A message with its length before it, as `read_frame` reads it."""
    return len(message).to_bytes(LENGTH_BYTES, "little") + message


def read_frame(end: BinaryIO) -> bytes | None:
    """The next message at this end of a connection; None if the other process has ended."""
    head = end.read(LENGTH_BYTES)
    size = int.from_bytes(head, "little")
    message = end.read(size)
    return message if len(head) == LENGTH_BYTES and len(message) == size else None


def _listen(lifeline: BinaryIO, on_message: Callable[[bytes], None]) -> None:
    """Pass on the parent's messages, until it ends."""
    with suppress(ConnectionResetError):
        while (message := read_frame(lifeline)) is not None:
            on_message(message)
    os._exit(BROKE)


def _end_with_thread(failure: threading.ExceptHookArgs) -> None:
    """End this process because one of its threads has ended by an error, and nobody does its work."""
    name = "unknown" if failure.thread is None else failure.thread.name
    error = failure.exc_value or failure.exc_type()
    _log.critical("the thread '%s' has broken, and ends its process", name, exc_info=error)
    logs.flush()
    os._exit(BROKE)
