"""The process of `serve`: it holds the port and keeps the engines and the API processes running.

It does nothing else, and imports little, so that nothing can break it or make it large. It answers clients
itself only while no API process does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from engine_core.engine_children import EngineProcesses
from engine_core.restarts import Restarter, exit_of, keep_engines
from engine_core.stalls import dump_all, is_stopped, watch
from server.options.server_flags import ServerConfig
from server.run import api_children as messages
from server.run.api_children import NOTHING_LEFT, ApiProcess, ApiProcesses
from server.run.fork_server import reap_others
from server.run.standby import Standby
from worker import logs
from worker.child import BROKE, CANNOT_START, DUMP_STACKS, STOPPED, Child
from worker.host.machine import service_manager

if TYPE_CHECKING:
    from server.run.model_processes import ModelProcesses  # few servers need it

EXTRA_SECONDS = 10.0
"""Seconds beyond its own time-outs after which a process is killed."""
FORCED_SECONDS = 2.0
"""Seconds for API processes to end after a second signal, or before they have served anything."""
EXPLAIN_SECONDS = 1.0
"""Seconds for all API processes to end by themselves when no engine can be started: one prints the reason."""
ENGINE_SECONDS = 3.0
"""Seconds for engines to end by themselves once they have nothing left to do."""
_PIPE_BYTES = 1 << 16
"""All that a pipe holds: no line is read in two parts."""
FINISH_SECONDS = 0.1
"""Seconds for those who have just connected to the server when it ends."""

_log = logging.getLogger(__name__)


def run(
    config: ServerConfig,
    listener: socket.socket,
    engines: EngineProcesses | ModelProcesses,
    servers: ApiProcesses,
) -> int:
    """Serves until the end and returns the exit code, 0 only if the end was asked for."""
    return asyncio.run(Supervisor(config, listener, engines, servers).run())


class Supervisor:
    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        engines: EngineProcesses | ModelProcesses,
        servers: ApiProcesses,
    ) -> None:
        self._config = config
        self._engines = engines
        self._servers = servers
        self._standby = Standby(listener, config)
        self._restarters = [
            Restarter(server, may_return=self.may_return, on_change=self._open_or_close) for server in servers
        ]
        self.code: int | None = None
        """The exit code, once the server shall end."""
        self._ending = asyncio.Event()
        self._force = asyncio.Event()
        self._service_manager = ServiceManager(*service_manager())
        self._has_terminal = sys.stderr.isatty()

    async def run(self) -> int:
        """Keeps all processes running until the server shall end, ends them, and returns the exit code."""
        loop = asyncio.get_running_loop()
        self._catch_signals(loop)
        loop.add_reader(self._servers.reports, self._read_reports)
        watching = watch(
            list(self._servers),
            self._note_stall,
            leaving=self._ending.is_set,
            on_look=self._look,
        )
        watcher = loop.create_task(watching)
        engines = loop.create_task(
            keep_engines(self._engines, self)
            if isinstance(self._engines, EngineProcesses)
            else self._engines.keep(self._servers, self._servers.tell)
        )
        kept = [loop.create_task(self._keep(restarter)) for restarter in self._restarters]
        await self._ending.wait()
        self._service_manager.stopping()
        await _cancel(kept)
        await self._end_servers()
        await _cancel([engines, watcher])
        await self._end_engines()
        self._engines.stop(0)
        if self.code == STOPPED:
            _log.info("stopped: all processes of the server and its engines have ended")
        logs.flush()
        await self._standby.finish(FINISH_SECONDS)
        return BROKE if self.code is None else self.code

    def _look(self) -> None:
        """Do what is due twice a second."""
        self._service_manager.live()
        if os.getpid() == 1 and isinstance(self._engines, EngineProcesses):  # a container's, without an init
            reap_others({each.process.pid for each in [*self._servers, *self._engines.engines]})

    # What happens to engines, for the clients in the API processes.

    def engine_exited(self, number: int, code: int) -> None:
        self._servers.tell(messages.EngineExited(number, code, time.monotonic()))

    def engine_given_up(self, number: int, reason: str, *, explained: bool) -> None:
        self._servers.tell(messages.EngineGivenUp(number, reason, explained))

    def engine_stalled(self, number: int, stalled: bool) -> None:
        self._servers.tell(messages.EngineStalled(number, stalled))

    # API processes.

    async def _keep(self, restarter: Restarter) -> None:
        await restarter.keep_running()
        if restarter.given_up and self._config.exit_on_failure:
            self.end(BROKE)

    def may_return(self, code: int) -> bool:
        """Whether an API process that exited with this code is started again. If not, the server ends."""
        if code == NOTHING_LEFT:
            self.end(BROKE)
        elif code in (BROKE, CANNOT_START) and not self._engines.worked:
            self.end(code)  # it would be the same again
        return not self._ending.is_set()

    def _note_stall(self, server: ApiProcess, stalled: bool) -> None:
        server.stalled = stalled
        self._open_or_close()

    def _open_or_close(self) -> None:
        """Let the stand-by listener answer while no API process accepts, or begins to."""
        if self._ending.is_set():
            return
        pairs = zip(self._servers, self._restarters, strict=True)
        running = [server.stalled for server, restarter in pairs if restarter.runs]
        if not all(running):
            self._standby.close()
        elif running:
            self._standby.open("api_stalled")
        else:
            hopeless = all(restarter.given_up for restarter in self._restarters)
            self._standby.open("api_given_up" if hopeless else "api_restarting")

    def _read_reports(self) -> None:
        for line in os.read(self._servers.reports, _PIPE_BYTES).decode().splitlines():
            report, *numbers = line.split()
            if report == messages.SERVED:
                self._note_that_it_served()
            elif not isinstance(self._engines, EngineProcesses):
                self._engines.act(report, *map(int, numbers))

    def _note_that_it_served(self) -> None:
        """Act on the first report of an API process that requests are served."""
        self._engines.worked = True
        self._servers.note_that_it_served()
        self._service_manager.ready()

    # Signals.

    def _catch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            loop.add_signal_handler(number, self._stop)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        loop.add_signal_handler(DUMP_STACKS, dump_all)

    def _stop(self) -> None:
        """End the server after draining; a second call does not wait for running requests."""
        if self._ending.is_set():
            self._force.set()
        self.end(STOPPED)

    def _hang_up(self) -> None:
        """Read files again, as daemons do at SIGHUP; or stop, if the terminal was closed."""
        if self._has_terminal and not _terminal_is_there():
            self._stop()
        else:
            self._servers.tell(messages.Reload())
            if not isinstance(self._engines, EngineProcesses):
                self._engines.reread()

    def end(self, code: int) -> None:
        """Let `run` end all processes and return this code. The first one counts."""
        if self.code is None:
            self.code = code
        self._ending.set()

    # The end.

    async def _end_servers(self) -> None:
        """Let API processes finish their requests and end. The stand-by listener answers whoever comes."""
        self._engines.leaving = True
        if self.code == STOPPED and self._engines.worked and self._config.drain_delay:
            self._servers.tell(messages.Leaving())
            await self._unless_forced(asyncio.Event().wait(), self._config.drain_delay)
        self._standby.open("draining")
        if self.code != STOPPED:
            await self._unless_forced(_exits_of(self._servers.running), EXPLAIN_SECONDS)
        for process in self._servers.running:
            process.terminate()
        if not self._engines.worked:
            self._engines.terminate()  # nobody waits for them
        patience = self._config.shutdown_timeout + EXTRA_SECONDS
        # Nothing is lost before a server has served, and a process may be at work that cannot be interrupted.
        await self._unless_forced(
            _exits_of(self._servers.running), patience if self._engines.worked else FORCED_SECONDS
        )
        if self._force.is_set():
            self._servers.tell(messages.CutOff())
            with suppress(TimeoutError):
                await asyncio.wait_for(_exits_of(self._servers.running), FORCED_SECONDS)
        for process in self._servers.running:
            if self._engines.worked:
                _log.error("%s does not end: it is killed", process.name)
            process.kill()

    async def _end_engines(self) -> None:
        """Let engines end, which have nothing left to do."""
        self._engines.terminate()
        for engine in self._engines.engines:
            if is_stopped(engine.process.pid):
                engine.process.kill()
        await self._unless_forced(
            _exits_of(engine.process for engine in self._engines.engines), ENGINE_SECONDS
        )

    async def _unless_forced(self, waiting: Coroutine[Any, Any, object], seconds: float) -> None:
        """Wait for so many seconds at most, and no longer after a second signal."""
        tasks = [asyncio.create_task(waiting), asyncio.create_task(self._force.wait())]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(tasks)


class ServiceManager:
    """Hears by datagrams, as systemd does, that the server is ready, that it lives, and that it ends."""

    def __init__(self, address: str, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`address` is that of its socket, empty if nobody asks for notices.

        `seconds`: it ends a server from which it hears nothing for so long; 0 if it does not.
        """
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._seconds = seconds
        self._clock = clock
        self._lived = -seconds

    def ready(self) -> None:
        self._send("READY=1\nSTATUS=Requests are served.")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=Running requests are finished.")

    def live(self) -> None:
        """Say that the server lives, if that is due. Call this several times in `seconds`."""
        if self._seconds and self._clock() >= self._lived + self._seconds / 3:
            self._lived = self._clock()
            self._send("WATCHDOG=1")

    def _send(self, notice: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(notice.encode(), self._address)
        except OSError as error:
            _log.warning("the service manager does not take notices: %s", error)


async def _exits_of(children: Iterable[Child]) -> None:
    """Wait until all of these have ended."""
    for process in children:
        await exit_of(process)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they are."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _terminal_is_there() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
