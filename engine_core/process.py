"""The engine's process, `python -m engine_core.process FD`: requests from the wire, steps, answers to the
wire.

One thread, one loop. It exits with 0 if it was asked to, with 2 if it could not start, and with 1 if it
broke.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time

import msgspec
import zmq

from engine_core.config import ProcessConfig
from engine_core.engine import Engine
from engine_core.executor import ExecutorDead, MakeExecutor
from engine_core.protocol import (
    Abort,
    Add,
    AddMany,
    Answer,
    Dead,
    Drain,
    Leaving,
    Outputs,
    Progress,
    Request,
    ResetPrefixCache,
)
from engine_core.ranks.placement import choose
from engine_core.scheduling.scheduler import OutputsByClient
from engine_core.scheduling.stats import StatsFilter
from engine_core.wire.transport import EngineEnd
from worker import child, logs
from worker.child import BROKE, CANNOT_START, STOPPED

_SMALLEST_PROGRESS = 0.01
_BROKEN = "the engine failed and has to be restarted; its log says why"

_log = logging.getLogger(__name__)


def main(executor: MakeExecutor | None = None) -> int:
    """`executor` takes the place of the one that the configuration asks for."""
    gc.disable()  # until all is loaded: of what is imported nothing is garbage, and looking takes a while
    config = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=ProcessConfig)
    logs.setup("engine" if config.alone else f"engine {config.index}", config.log_level)
    context = zmq.Context()
    ends = [EngineEnd(context, address, config.index) for address in config.servers]
    try:
        return _serve(config, ends, executor)
    finally:
        for end in ends:
            end.close()
        context.term()


def _serve(config: ProcessConfig, ends: list[EngineEnd], executor: MakeExecutor | None) -> int:
    # Loading cannot be asked to stop half-way, and has nothing to lose.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED))
    try:
        engine = Engine.start(config.engine, _ProgressTeller(ends), executor or choose(config))
    except Exception as error:
        _log.debug("the engine cannot start", exc_info=True)
        _give_up(ends, logs.one_line(error))
        return CANNOT_START
    try:
        EngineLoop(engine, ends, config.drain_seconds).run()
    except Exception as error:
        _log.exception("the engine broke")
        _give_up(ends, str(error) if isinstance(error, ExecutorDead) else _BROKEN)
        return BROKE
    finally:
        engine.stop()
    _tell_all(ends, Dead("the engine has been stopped"))
    return STOPPED


class EngineLoop:
    """Each end is a server; its place in the list is the client's number in the engine."""

    def __init__(self, engine: Engine, ends: list[EngineEnd], drain_seconds: float) -> None:
        self._engine = engine
        self._ends = ends
        self._drain_seconds = drain_seconds
        self._drain_until: float | None = None
        self._asked_to_end = False
        self._stats_filter = StatsFilter()
        self._signalled, self._wake = socket.socketpair()
        self._poller = zmq.Poller()
        self._poller.register(self._signalled, zmq.POLLIN)
        for end in ends:
            self._poller.register(end.requests.sock, zmq.POLLIN)
            self._poller.register(end.monitor, zmq.POLLIN)
        for sentinel in engine.sentinels:
            self._poller.register(sentinel, zmq.POLLIN)

    def run(self) -> None:
        self._catch_signals()
        gc.freeze()  # what loading has left behind is here to stay: never look through it again
        gc.enable()
        _tell_all(self._ends, self._engine.ready)
        while self._engine.busy or self._drain_until is None:
            self._read()
            if self._drain_until is not None and time.monotonic() >= self._drain_until:
                self._engine.abort_all()
            self._write(self._engine.step())

    def _catch_signals(self) -> None:
        """A signal leaves a mark and wakes the poll; the loop acts on it. A second one ends all at once."""
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())

        def stop(*_: object) -> None:
            if self._asked_to_end:
                os._exit(STOPPED)
            self._asked_to_end = True

        signal.signal(signal.SIGTERM, stop)

    def _drain(self, seconds: float) -> None:
        """Servers hear of it before the first request is refused, and give that one to another engine."""
        _tell_all(self._ends, Leaving())
        self._drain_until = time.monotonic() + seconds
        self._engine.drain()

    def _read(self) -> None:
        """Take in all that has come. With nothing to do, wait for it."""
        for end in self._ends:
            self._poller.register(end.push, zmq.POLLOUT if end.backlog else 0)
        idle = not self._engine.busy and self._drain_until is None
        ready = {sock for sock, _ in self._poller.poll(None if idle else 0)}
        if idle and not ready.isdisjoint(self._engine.sentinels):
            self._engine.check()
        if self._signalled.fileno() in ready:
            self._signalled.recv(4096)
            self._drain(self._drain_seconds)
        for client, end in enumerate(self._ends):
            if end.push in ready:
                end.flush()
            if end.monitor in ready:
                self._follow(client, end)
            if end.requests.sock in ready:
                for request in end.requests.read():
                    self._handle(client, request)

    def _follow(self, client: int, end: EngineEnd) -> None:
        for change in end.changes():
            if change == "lost":
                self._engine.abort_all(client)
            else:
                end.greet()
                end.send(self._engine.ready)

    def _handle(self, client: int, request: Request) -> None:
        match request:
            case Add():
                self._engine.add(client, request)
            case AddMany(adds):
                for add in adds:
                    self._engine.add(client, add)
            case Abort(ids):
                self._engine.abort(client, ids)
            case Drain(seconds):
                self._drain(seconds)
            case ResetPrefixCache():
                self._engine.reset_prefix_cache()

    def _write(self, outputs: OutputsByClient) -> None:
        news = self._stats_filter.due(self._engine.stats(), time.monotonic())
        for client, end in enumerate(self._ends):
            told = outputs.get(client)
            if told:
                keeps_up = end.send(Outputs(outputs=told, stats=news))
            else:
                keeps_up = news is None or bool(end.backlog) or end.send(news)
            if not keeps_up:
                _log.error("server %d does not read its answers: its requests are aborted", client)
                self._engine.abort_all(client)


class _ProgressTeller:
    """Called from whichever thread loads; only here are the sockets used by more than one thread."""

    def __init__(self, ends: list[EngineEnd]) -> None:
        self._ends = ends
        self._lock = threading.Lock()
        self._last = Progress(stage="", fraction=0.0)

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            step = progress.fraction - self._last.fraction
            same = (progress.stage, progress.detail) == (self._last.stage, self._last.detail)
            if same and step < _SMALLEST_PROGRESS:
                return
            self._last = progress
            _tell_all(self._ends, progress)


def _tell_all(ends: list[EngineEnd], answer: Answer) -> None:
    for end in ends:
        end.send(answer)


def _give_up(ends: list[EngineEnd], reason: str) -> None:
    _tell_all(ends, Dead(reason))
    print(f"error: {reason}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
