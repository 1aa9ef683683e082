"""The engine's process, `python -m engine_core.engine_main FD`: reads requests, runs steps, sends answers.

It has one thread and one loop. Its exit codes are those of worker/child.py.
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
from functools import partial
from itertools import count
from math import ceil, inf

import msgspec
import zmq

from engine_core import protocol
from engine_core.config import ProcessConfig
from engine_core.engine import Engine
from engine_core.executor import ExecutorDead, MakeExecutor, OtherEngineDead
from engine_core.load_engine import ModelLoader
from engine_core.ranks.ranks_executor import make_executor
from engine_core.scheduling.slow_step_parts import StepWatch
from engine_core.scheduling.stats import StatsFilter
from engine_core.service.message_handler import MessageHandler
from engine_core.wire.transport import EngineEnd
from models.plugins import Registrations, use_registrations
from worker import child, logs
from worker.child import BROKE, CANNOT_START, LEFT_ALONE, STOPPED
from worker.host.machine import process_age
from worker.host.progress_page import ProgressWriter

_SMALLEST_PROGRESS = 0.01
_LAST_SECONDS = 1.0
"""The time for other engines that share experts to end, after that for which requests may run on."""
_READ_SECONDS = 0.01
"""The time for which messages of a server are handled that have come, before the next step has its turn."""
_BROKEN = "the engine failed and has to be restarted; its log says why"

_log = logging.getLogger(__name__)


def main(make: MakeExecutor | None = None) -> int:
    """Runs the engine and returns the exit code. `make` makes another executor than the configuration's."""
    gc.disable()  # until all is loaded: nothing that is imported is garbage, and collecting takes a while
    config = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=ProcessConfig)
    use_registrations(Registrations(config.model_classes, config.search_path))
    number = "" if config.alone else f" {config.index}"
    logs.setup(f"engine{number}{config.label and f' {config.label}'}", config.log_level)
    context = zmq.Context()
    ends = [EngineEnd(context, address, config.index) for address in config.servers]
    try:
        return _serve(config, ends, make)
    finally:
        for end in ends:
            end.close()
        context.term()


def _serve(config: ProcessConfig, ends: list[EngineEnd], make: MakeExecutor | None) -> int:
    boot_seconds = process_age()
    # Loading cannot be asked to stop half-way, and has nothing to lose.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED))
    try:
        make = make or make_executor(config)
        report = _ProgressSender(ends, config.progress_page)
        load = ModelLoader(config.engine, report, make, config.expert_replicas)
        engine = Engine(*load(), config.progress_page, load, is_uninterrupted=True)
        whole = boot_seconds + engine.ready.start_seconds
        engine.ready = msgspec.structs.replace(engine.ready, start_seconds=whole)
    except Exception as error:
        _log.debug("the engine cannot start", exc_info=True)
        _report_end(ends, error, str(error) if isinstance(error, OtherEngineDead) else logs.one_line(error))
        return LEFT_ALONE if isinstance(error, OtherEngineDead) else CANNOT_START
    try:
        loop = EngineLoop(engine, ends, config.drain_seconds, config.replicas.follow_the_first)
        if config.debug_steps:
            StepWatch(loop)
        loop.run()
    except Exception as error:
        if not isinstance(error, OtherEngineDead):
            _log.exception("the engine broke")
        _report_end(ends, error, str(error) if isinstance(error, ExecutorDead) else _BROKEN)
        return LEFT_ALONE if isinstance(error, OtherEngineDead) else BROKE
    finally:
        engine.stop()
    _send_all(ends, protocol.Dead("the engine has been stopped"))
    return STOPPED


class EngineLoop:
    """Moves requests and answers between the engine and its API servers, and runs the engine's steps."""

    def __init__(
        self, engine: Engine, ends: list[EngineEnd], drain_seconds: float, leaves_with_first: bool = False
    ) -> None:
        """`ends[i]` is API server i, which the engine knows as client i.

        `leaves_with_first`: whether it ends when the first engine does, which is on another machine.
        """
        self._engine = engine
        self._ends = ends
        self._drain_seconds = drain_seconds
        self._leaves_with_first = leaves_with_first
        self._drain_until: float | None = None
        self._terminated = False
        self._handler = MessageHandler(
            engine, lambda client, answer: ends[client].send(answer), partial(_send_all, ends), self._drain
        )
        self._stats_filter = StatsFilter()
        self._signalled, self._wake = socket.socketpair()
        self._poller = self._make_poller()

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._signalled, zmq.POLLIN)
        for end in self._ends:
            poller.register(end.requests.sock, zmq.POLLIN)
            poller.register(end.monitor, zmq.POLLIN)
        return poller

    def run(self) -> None:
        self._catch_signals()
        gc.freeze()  # what loading has left behind is here to stay: the collector never visits it again
        gc.enable()
        _send_all(self._ends, self._engine.ready)
        self._write({})  # the first statistics say how fast it is
        while self._drain_until is None or not self._engine.leave(self._drain_until + _LAST_SECONDS):
            self._read()
            self._update()
            if self._drain_until is not None and time.monotonic() >= self._drain_until:
                self._engine.abort_all()
            if self._engine.outputs:  # who has to wait, or is refused, shall know it before the step ends
                self._write(self._engine.take_outputs())
            self._write(self._engine.step(wait=False))
            self._handler.tell()
            if self._handler.pauses:
                self._handler.pause()
            if self._handler.sleep_orders and not self._engine.busy:
                self._obey()

    def _update(self) -> None:
        """Load weights as was ordered, by several servers perhaps: no other message may wake the loop."""
        while self._may_update:
            self._handler.update()
            self._look_again()

    @property
    def _may_update(self) -> bool:
        """Whether weights were ordered that can be loaded now."""
        return bool(self._handler.updates) and self._engine.intake.may_reload

    def _obey(self) -> None:
        """Sleep and wake as was ordered."""
        self._handler.obey()
        self._look_again()

    def _look_again(self) -> None:
        """Poll what runs steps, which is another one now."""
        if not self._engine.asleep:
            gc.freeze()
        self._poller = self._make_poller()
        self._engine.register(self._poller)  # before a step begins, or nothing would tell that it is done

    def _catch_signals(self) -> None:
        """Let SIGTERM wake the poll, so that the loop acts on it. A second one ends the process at once."""
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())

        def stop(*_: object) -> None:
            if self._terminated:
                os._exit(STOPPED)
            self._terminated = True

        signal.signal(signal.SIGTERM, stop)

    def _drain(self, seconds: float) -> None:
        """Finish the accepted requests, then end. Servers learn of it first and choose other replicas."""
        _send_all(self._ends, protocol.Leaving())
        self._drain_until = time.monotonic() + seconds
        self._engine.drain()

    def _read(self) -> None:
        """Handle the messages that have come. With nothing else to do, wait for one, or for a step."""
        for end in self._ends:
            self._poller.register(end.push, zmq.POLLOUT if end.backlog else 0)
        self._engine.register(self._poller)
        idle = self._engine.idle
        if idle:
            self._engine.prepare()
            self._engine.progress.rest()
        ready = dict(self._poller.poll(self._patience(idle=idle)))
        if idle:
            self._engine.progress.wake()
            self._engine.check()
        if self._signalled.fileno() in ready:
            self._signalled.recv(4096)
            self._drain(self._drain_seconds)
        if self._leaves_with_first and self._drain_until is None and self._engine.first_leaves:
            self._drain(self._drain_seconds)
        for client, end in enumerate(self._ends):
            if end.push in ready:
                end.flush()
            if end.monitor in ready:
                self._follow(client, end)
            if end.requests.sock in ready:
                self._handle_some(client, end)

    def _patience(self, *, idle: bool) -> int | None:
        """The milliseconds for which to wait for a message; None if nothing else can happen."""
        waits = self._engine.waits
        if (not idle and not waits) or self._may_update:
            return 0
        until = self._drain_until
        first = self._engine.next_deadline
        if until is not None:
            is_last = not self._engine.busy or waits
            first = min(first, until + _LAST_SECONDS + 0.01 if is_last else until)
        return None if first == inf else max(0, ceil(1000 * (first - time.monotonic())))

    def _follow(self, client: int, end: EngineEnd) -> None:
        """Abort the requests of a server that has gone, and greet one that has taken its place."""
        for change in end.changes():
            if change == "lost":
                self._engine.abort_all(client)
                self._handler.forget(client)
            else:
                end.greet()
                for answer in self._handler.greeting():
                    end.send(answer)

    def _handle_some(self, client: int, end: EngineEnd) -> None:
        """Handle a server's messages, of which a crowd's wait in the socket while steps go on."""
        until = time.monotonic() + _READ_SECONDS
        for request in end.requests.read():
            self._handler.handle(client, request)
            if time.monotonic() >= until:
                return

    def _write(self, outputs: protocol.OutputsByClient) -> None:
        """Send its outputs to each server, and statistics now and then."""
        stats = self._stats_filter.due(self._engine.stats, time.monotonic(), idle=self._engine.idle)
        for client, end in enumerate(self._ends):
            own = outputs.get(client)
            if own:
                keeps_up = end.send(protocol.Outputs(outputs=own, stats=stats))
            else:
                keeps_up = stats is None or bool(end.backlog) or end.send(stats)
            if not keeps_up:
                _log.error("server %d does not read its answers: its requests are aborted", client)
                self._engine.abort_all(client)


class _ProgressSender:
    """Sends how far the start has come, from whichever thread loads, to all servers."""

    def __init__(self, ends: list[EngineEnd], progress_page: str = "") -> None:
        """`progress_page`: the file in which a supervisor reads that the start goes on."""
        self._ends = ends
        self._signs, self._page = count(1), ProgressWriter(progress_page)
        self._lock = threading.Lock()
        self._last = protocol.Progress(phase="", fraction=0.0)

    def __call__(self, progress: protocol.Progress) -> None:
        with self._lock:
            self._page.starting(next(self._signs))
            step = progress.fraction - self._last.fraction
            same = (progress.phase, progress.detail) == (self._last.phase, self._last.detail)
            if same and step < _SMALLEST_PROGRESS:
                return
            self._last = progress
            _send_all(self._ends, progress)


def _send_all(ends: list[EngineEnd], answer: protocol.Answer) -> None:
    for end in ends:
        end.send(answer)


def _report_end(ends: list[EngineEnd], error: Exception, reason: str) -> None:
    _send_all(ends, protocol.Dead(reason, with_another=isinstance(error, OtherEngineDead)))
    logs.print_error(reason)


if __name__ == "__main__":
    sys.exit(main())
