"""The engine's process, `python -m engine_core.process FD`: it reads requests, runs steps and sends answers.

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
from collections import deque
from itertools import count
from math import ceil
from pathlib import Path

import msgspec
import zmq

from engine_core import protocol
from engine_core.adapters.messages import AdapterState, DropAdapter, LoadAdapter
from engine_core.config import ProcessConfig
from engine_core.engine import Engine
from engine_core.executor import ExecutorDead, MakeExecutor, OtherEngineDead
from engine_core.ranks.ranks_executor import make_executor
from engine_core.reason_codes import SENTENCES
from engine_core.scheduling.stats import StatsFilter
from engine_core.scheduling.step_watch import StepWatch
from engine_core.wire.transport import EngineEnd
from models.plugins import Registrations, use_registrations
from worker import child, logs
from worker.calls.messages import WorkerReturn
from worker.child import BROKE, CANNOT_START, LEFT_ALONE, STOPPED
from worker.host.machine import forget_files, process_age
from worker.host.progress_page import ProgressWriter

_SMALLEST_PROGRESS = 0.01
_WITHOUT_ADAPTERS = "the engine was started without --enable-lora"
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
        engine = Engine.start(
            config.engine,
            _ProgressSender(ends, config.progress_page),
            make,
            config.progress_page,
            config.expert_replicas,
        )
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
        self._sleep_orders: deque[protocol.Sleep] = deque()
        """Orders to sleep or to wake that have not been obeyed yet."""
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
        while self._drain_until is None or not (self._engine.leave() or self._is_overdue):
            self._read()
            if self._drain_until is not None and time.monotonic() >= self._drain_until:
                self._engine.abort_all()
            if outputs := self._engine.take_outputs():
                self._write(outputs)  # who has to wait, or is refused, shall know it before the step ends
            self._write(self._engine.step(wait=False))
            for client, returned in self._engine.calls.take():
                self._ends[client].send(returned)
            if (adapters := self._engine.adapters) is not None:
                for state in adapters.take_states():
                    _send_all(self._ends, state)
            while self._sleep_orders and not self._engine.busy:
                self._obey(self._sleep_orders.popleft())

    @property
    def _is_overdue(self) -> bool:
        """Whether others that share experts have had their time to end, too, and go on."""
        until = self._drain_until
        return self._engine.shares_experts and until is not None and time.monotonic() > until + _LAST_SECONDS

    def _obey(self, order: protocol.Sleep) -> None:
        """Sleep or wake, unless it is so already, and tell all servers. An engine that cannot wake tells why,
        and sleeps on."""
        problem = self._change(order) if bool(order.level) != self._engine.asleep else ""
        if self._engine.asleep:
            _send_all(self._ends, protocol.Progress("asleep", 1.0, self._engine.ready.folder, problem))
        else:
            _send_all(self._ends, self._engine.ready)

    def _change(self, order: protocol.Sleep) -> str:
        """Sleep or wake; returns why it cannot, or an empty text.

        Level 1 leaves the checkpoint's pages in the system's cache of files, level 2 has it drop them.
        """
        self._engine.progress.rest()
        problem = ""
        try:
            if order.level:
                gc.unfreeze()
                self._engine.fall_asleep()
                if order.level > 1:
                    forget_files(Path(self._engine.ready.folder))
            else:
                self._engine.wake()
                gc.freeze()
        except Exception as error:
            problem = logs.one_line(error)
            _log.error("the engine cannot wake, and sleeps on: %s", problem)
        self._poller = self._make_poller()  # what runs steps is another one now
        return problem

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
        ready = {sock for sock, _ in self._poller.poll(self._patience(idle=idle))}
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
        if not idle and not waits:
            return 0
        until = self._drain_until
        ends = until if until is None or (self._engine.busy and not waits) else until + _LAST_SECONDS + 0.01
        times = (ends, self._engine.next_deadline)
        first = min((at for at in times if at is not None), default=None)
        return None if first is None else max(0, ceil(1000 * (first - time.monotonic())))

    def _follow(self, client: int, end: EngineEnd) -> None:
        """Abort the requests of a server that has gone, and greet one that has taken its place."""
        for change in end.changes():
            if change == "lost":
                self._engine.abort_all(client)
            else:
                end.greet()
                ready = self._engine.ready
                end.send(protocol.Progress(phase="ready", fraction=1.0, folder=ready.folder))
                if self._engine.adapters is not None:
                    for state in self._engine.adapters.all_states:
                        end.send(state)
                end.send(ready)
                if self._engine.asleep:
                    end.send(protocol.Progress("asleep", 1.0, ready.folder))

    def _handle_some(self, client: int, end: EngineEnd) -> None:
        """Handle a server's messages, of which a crowd's wait in the socket while steps go on."""
        until = time.monotonic() + _READ_SECONDS
        for request in end.requests.read():
            self._handle(client, request)
            if time.monotonic() >= until:
                return

    def _handle(self, client: int, request: protocol.Request) -> None:
        match request:
            case protocol.Add():
                self._engine.add(client, request)
            case protocol.AddMany(adds):
                for add in adds:
                    self._engine.add(client, add)
            case protocol.Spelling():
                self._engine.spell(request)
            case protocol.Abort(ids):
                self._engine.abort(client, ids)
            case protocol.Pause(ids):
                self._engine.pause(client, ids)
            case protocol.Go(ids):
                self._engine.pause(client, ids, paused=False)
            case protocol.Ask(id):
                self._engine.ask(client, id)
            case protocol.Drain(seconds):
                self._drain(seconds)
            case protocol.ResetPrefixCache():
                self._engine.reset_prefix_cache()
            case protocol.Sleep(level, abort):
                self._sleep_orders.append(request)
                if level:
                    self._engine.refusal = SENTENCES["asleep"], "asleep"
                if abort:
                    self._engine.abort_all()
            case LoadAdapter(adapter, facts):
                if (adapters := self._engine.adapters) is not None:
                    adapters.load(adapter, facts)
                else:
                    self._ends[client].send(AdapterState(adapter, error=_WITHOUT_ADAPTERS))
            case DropAdapter(name):
                if (adapters := self._engine.adapters) is not None:
                    adapters.drop(name)
            case protocol.CallWorkers() if self._engine.asleep:
                asleep = WorkerReturn(0, error="the model is asleep")
                self._ends[client].send(protocol.Returned(request.id, [asleep]))
            case protocol.CallWorkers():
                self._engine.calls.add(client, request)

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
