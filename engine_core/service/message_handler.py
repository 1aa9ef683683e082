"""Has an engine do what its servers' messages say, whichever way these come and answers go."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from engine_core import protocol
from engine_core.adapters.messages import AdapterState, DropAdapter, LoadAdapter
from engine_core.engine import Engine
from engine_core.executor import ExecutorDead
from engine_core.reason_codes import SENTENCES
from worker import logs
from worker.calls.messages import WorkerReturn
from worker.host.machine import forget_files

_WITHOUT_ADAPTERS = "the engine was started without --enable-lora"

_log = logging.getLogger(__name__)


class MessageHandler:
    def __init__(
        self,
        engine: Engine,
        send: Callable[[int, protocol.Answer], object],
        send_all: Callable[[protocol.Answer], None],
        drain: Callable[[float], None],
    ) -> None:
        """`send` sends an answer to the server of a number, and `send_all` to all of them; `drain` has the
        engine end within some seconds."""
        self._engine, self._send, self._send_all, self._drain = engine, send, send_all, drain
        self.sleep_orders: deque[protocol.Sleep] = deque()
        """Orders to sleep or to wake, which wait until nothing runs."""
        self.pauses: list[protocol.PauseAll] = []
        """Orders to pause all requests that have not come about yet."""

        self.updates: deque[tuple[int, protocol.UpdateWeights]] = deque()
        """Orders to compute with other weights, and the servers that gave them."""
        self._ordered: tuple[int, str] | None = None
        """The server whose weights fit and are loaded next, and their folder."""

    def greeting(self) -> Iterator[protocol.Answer]:
        """What a server is told that has just connected."""
        engine = self._engine
        yield protocol.Progress(phase="ready", fraction=1.0, folder=engine.ready.folder)
        if engine.intake.adapters is not None:
            yield from engine.intake.adapters.all_states
        yield engine.ready
        if engine.asleep:
            yield protocol.Progress("asleep", 1.0, engine.ready.folder)
        if engine.paused:
            yield protocol.AllPaused(True)

    def handle(self, client: int, request: protocol.Request) -> None:
        """Do what a message of a server says."""
        engine = self._engine
        match request:
            case protocol.AddRequest():
                engine.add(client, request)
            case protocol.AddRequests(adds):
                for add in adds:
                    engine.add(client, add)
            case protocol.Spelling():
                engine.intake.spell(request)
            case protocol.Abort(ids):
                engine.abort(client, ids)
            case protocol.Pause(ids):
                engine.pause(client, ids)
            case protocol.Resume(ids):
                engine.pause(client, ids, paused=False)
            case protocol.AskStanding(id):
                engine.ask(client, id)
            case protocol.Drain(seconds):
                self._drain(seconds)
            case protocol.ResetPrefixCache():
                engine.reset_prefix_cache()
            case protocol.PauseAll(mode):
                self.pauses.append(request)
                engine.pause_all(mode)
            case protocol.ResumeAll():
                self._resume()
            case protocol.UpdateWeights():
                self.updates.append((client, request))
            case protocol.Sleep(level, abort):
                self.sleep_orders.append(request)
                if level:
                    engine.refusal = SENTENCES["asleep"], "asleep"
                if abort:
                    engine.abort_all()
            case LoadAdapter(adapter, facts):
                if engine.intake.adapters is not None:
                    engine.intake.adapters.load(adapter, facts)
                else:
                    self._send(client, AdapterState(adapter, error=_WITHOUT_ADAPTERS))
            case DropAdapter(name, ordered):
                if engine.intake.adapters is not None:
                    engine.intake.adapters.drop(name, ordered)
            case protocol.CallWorkers() if engine.asleep:
                asleep = WorkerReturn(0, error="the model is asleep")
                self._send(client, protocol.Returned(request.id, [asleep]))
            case protocol.CallWorkers():
                engine.calls.add(client, request)

    def tell(self) -> None:
        """Send what has come of calls of workers and of adapters since the last time."""
        if self._engine.calls.under_way:
            for client, returned in self._engine.calls.take():
                self._send(client, returned)
        if (adapters := self._engine.intake.adapters) is not None:
            for state in adapters.take_states():
                self._send_all(state)

    def pause(self) -> None:
        """Tell all servers of a pause that was ordered, once nothing is computed any more."""
        if not self._engine.stands_still:
            return
        self._engine.complete_pause()
        if any(order.clear_cache and order.mode != "keep" for order in self.pauses):
            self._engine.reset_prefix_cache()
        self.pauses.clear()
        self._send_all(protocol.AllPaused(True))

    def _resume(self) -> None:
        self.pauses.clear()
        self._engine.resume_all()
        self._send_all(protocol.AllPaused(False))

    def forget(self, client: int) -> None:
        """Note that a server has gone, whose orders others need not wait for."""
        if self._ordered is not None or self.updates:
            self.updates.append((client, protocol.UpdateWeights("", "give_up")))

    def update(self) -> None:
        """Follow the order of weights that came first, and answer. An engine that cannot keeps its own."""
        (client, order), engine, problem = self.updates.popleft(), self._engine, ""
        holder, folder = self._ordered or (client, "")
        if holder != client and order.kind in ("check", "load"):
            problem = f"those of {folder} are loaded now, which another process of this server has ordered"
            self._send(client, protocol.WeightsUpdated(problem, order.number, is_taken=True))
            return
        if holder == client:
            self._ordered = None
        if order.kind == "give_up":
            return
        try:
            if order.kind == "check":
                engine.find_weights(order.folder)
                self._ordered = client, order.folder
            elif order.kind == "load" or engine.ready.weights != order.folder:
                gc.unfreeze()
                if order.abort:
                    engine.abort_all()
                engine.update_weights(order.folder)
                self._send_all(engine.ready)
        except ExecutorDead:
            raise
        except Exception as error:
            problem = logs.one_line(error)
            _log.warning("the weights of %s are not used: %s", order.folder, problem)
        self._send(client, protocol.WeightsUpdated(problem, order.number))

    def obey(self) -> None:
        """Sleep and wake as was ordered, once nothing runs."""
        while self.sleep_orders and not self._engine.busy:
            self._obey(self.sleep_orders.popleft())

    def _obey(self, order: protocol.Sleep) -> None:
        """Sleep or wake, unless it is so already, and tell all servers. An engine that cannot wake tells why,
        and sleeps on."""
        problem = self._change(order) if bool(order.level) != self._engine.asleep else ""
        if self._engine.asleep:
            self._send_all(protocol.Progress("asleep", 1.0, self._engine.ready.folder, problem))
        else:
            self._send_all(self._engine.ready)

    def _change(self, order: protocol.Sleep) -> str:
        """Sleep or wake; returns why it cannot, or an empty text.

        Level 1 leaves the checkpoint's pages in the system's cache of files, level 2 has it drop them.
        """
        self._engine.progress.rest()
        try:
            if order.level:
                gc.unfreeze()
                self._engine.fall_asleep()
                if order.level > 1:
                    forget_files(Path(self._engine.ready.folder))
            else:
                self._engine.wake()
        except Exception as error:
            problem = logs.one_line(error)
            _log.error("the engine cannot wake, and sleeps on: %s", problem)
            return problem
        return ""
