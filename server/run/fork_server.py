"""A process that has imported what many children need, and forks them: `python -m server.run.fork_server FD`.

Children begin at once, and share the pages of all that was imported. A process with threads must not be
forked, so this one never has any. It forks each child twice, so that the kernel makes it a child of the fork
server's own parent, which waits for it as for any other.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import socket
import sys
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import msgspec

from worker import child
from worker.host.machine import environment_with

_PR_SET_CHILD_SUBREAPER = 36
_ANSWER_SECONDS = 5.0
"""Seconds in which a fork server that has imported everything makes a child; it takes some milliseconds."""
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables without which imports would start threads."""
_IMPORTED = b"imported"

_log = logging.getLogger(__name__)


class _Setup(msgspec.Struct, frozen=True):
    orders: int
    """The inherited descriptor of the socket on which children are ordered."""
    modules: list[str]
    prepare: list[str]


class ForkServer:
    """The parent's side. The process ends when this object is collected; its children do not."""

    def __init__(self, modules: Sequence[str], prepare: Sequence[str] = ()) -> None:
        """`modules` are imported once, for all children; `prepare` names functions, as module:function, that
        are called then."""
        self.works = False
        """Whether children are forked. Before that, and if it breaks, they are started like any others."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(_ANSWER_SECONDS)
        weakref.finalize(self, self._orders.close)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        setup = msgspec.msgpack.encode(_Setup(theirs.fileno(), list(modules), list(prepare)))
        with theirs:
            self.process = child.start(
                *("the fork server", "server.run.fork_server", setup, [theirs.fileno()]),
                environment=environment_with(**_NO_THREADS),
            )

    @property
    def descriptor(self) -> int:
        """A descriptor that becomes readable when all is imported, or will never be."""
        return self._orders.fileno()

    def begin(self) -> None:
        """Fork children from now on, if all is imported. Call this when the descriptor is readable."""
        with suppress(OSError):
            self.works = self._orders.recv(64) == _IMPORTED

    def start(self, name: str, module: str, payload: bytes, /) -> child.Child:
        """Run `main` of a module in a new process, as `child.start` does."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self._fork(module, theirs.fileno()) if self.works else 0
        if not pid:
            ours.close()
            return child.start(name, module, payload)
        return child.child_of(name, _Forked(pid), ours, payload)

    def _fork(self, module: str, descriptor: int) -> int:
        """The id of a new process, which gets the descriptor; 0 if none can be made."""
        try:
            socket.send_fds(self._orders, [module.encode()], [descriptor])
            pid = int(self._orders.recv(64) or b"0")
        except (OSError, ValueError):
            pid = 0
        if not pid:
            _log.warning("the fork server does not work: engines are started without it")
            self.works = False
            self.process.kill()
        return pid


def reap_others(known: Collection[int]) -> None:
    """Wait for children that have ended and are none of these: they were those of a child that has ended."""
    me = os.getpid()
    with suppress(OSError):
        for pid in map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split()):
            if pid not in known:
                os.waitpid(pid, os.WNOHANG)


class _Forked:
    """A process that the fork server has made, and that is a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        return self._wait(0) or 0

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:  # or its id may be another process's by now
            os.kill(self.pid, sig)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


def main() -> None:
    lifeline, payload = child.attach(int(sys.argv[1]))
    setup = msgspec.msgpack.decode(payload, type=_Setup)
    orders = socket.socket(fileno=setup.orders)
    for name in setup.modules:
        import_module(name)
    for called in setup.prepare:
        module, _, name = called.partition(":")
        getattr(import_module(module), name)()
    gc.collect()
    gc.freeze()  # a collector that visits what is shared would write to its pages
    if _has_threads():
        return
    orders.send(_IMPORTED)
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    poller.register(orders, select.POLLIN)
    while True:
        readable = {descriptor for descriptor, _ in poller.poll()}
        if lifeline.fileno() in readable:
            return  # the parent has ended: it sends nothing more
        message, descriptors, *_ = socket.recv_fds(orders, 256, 1)
        if not descriptors:
            return
        pid = _fork(descriptors[0])
        if not pid:
            lifeline.close()
            orders.close()
            _become(message.decode(), descriptors[0])
        os.close(descriptors[0])
        orders.send(str(pid).encode())


def _has_threads() -> bool:
    return len(os.listdir("/proc/self/task")) > 1


def _fork(descriptor: int) -> int:
    """Fork twice: returns the new process's id here, and 0 there, once it is a child of our parent."""
    from_middle, to_parent = os.pipe()
    wait, go = os.pipe()
    middle = os.fork()
    if not middle:
        pid = os.fork()
        if pid:
            os.write(to_parent, b"%d" % pid)
            os._exit(0)
        for end in (from_middle, to_parent, go):
            os.close(end)
        os.read(wait, 1)  # until the one between has ended
        os.close(wait)
        return 0
    for end in (to_parent, wait):
        os.close(end)
    pid = int(os.read(from_middle, 64))
    os.waitpid(middle, 0)
    for end in (from_middle, go):
        os.close(end)
    return pid


def _become(module: str, descriptor: int) -> None:
    """Run a module's `main` as a program of its own, and end."""
    os.setpgid(0, 0)  # as `child.start` has it
    signal.set_wakeup_fd(-1)
    sys.argv = [module, str(descriptor)]
    sys.exit(import_module(module).main())


if __name__ == "__main__":
    main()
