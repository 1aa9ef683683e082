"""An engine in a program's own process, with its frontend: whoever calls runs their event loop meanwhile."""

from __future__ import annotations

import asyncio
import signal
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from engine_core.client.client import EngineClient
from engine_core.engine import Engine
from engine_core.service.local_link import LocalLink
from server.errors import for_programs
from server.frontend.frontend import Frontend
from server.offline.engine_connection import SHUT_DOWN, end_frontend, open_frontend
from server.options.server_flags import ServerConfig

T = TypeVar("T")

_TURNS = 3
"""The turns of the loop in which requests are sent, and what a step has brought becomes outputs."""


class LocalEngine:
    """Runs what a program asks, and the engine's steps meanwhile. The engine ends with this object."""

    frontend: Frontend
    _client: EngineClient

    def __init__(self, config: ServerConfig, engine: Engine) -> None:
        """Loads the tokenizer. Raises the error for which the model cannot be used."""
        self.engine = engine
        self._link = LocalLink(engine, config.replicas.numbers[0])
        self._news = asyncio.Event()
        """Set when the engine has got something to do, or what is waited for has ended."""
        self._link.on_send = self._news.set
        self._runner = _Runner()
        opened: list[Frontend] = []
        self._stop = weakref.finalize(self, _stop, self._runner, engine, opened)
        self._stop.atexit = False  # the interpreter has ended the worker's thread by then
        try:
            self.frontend = self.call(self._open(config, opened))
        except BaseException:
            self._stop()
            raise

    async def _open(self, config: ServerConfig, opened: list[Frontend]) -> Frontend:
        client = self._client = EngineClient(self._link, config.replicas)
        client.gathers = True
        frontend = open_frontend(config, client)
        opened.append(frontend)
        await frontend.start(reads_bodies=False)
        return frontend

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns, during which the engine runs. An interrupt ends it, and what it has asked
        of the engine."""
        if not self._stop.alive:
            work.close()
        self._check_alive()
        with for_programs():
            return self._runner.run(self._drive(work))

    def learn_stats(self) -> None:
        """Has the frontend know what the engine tells of itself now."""
        self._link.tell_stats()

    def step(self) -> None:
        """Runs one step, and has what it brings become outputs."""
        self._check_alive()
        self._runner.run(self._step())

    def _check_alive(self) -> None:
        if not self._stop.alive:
            raise RuntimeError(SHUT_DOWN)

    def close(self) -> None:
        """Ends the engine. Further calls do nothing."""
        self._stop()

    async def _step(self) -> None:
        if self._link.busy:
            self._link.step()
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    async def _drive(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._news.set())
        try:
            for _ in range(_TURNS):
                if not task.done():
                    await asyncio.sleep(0)
            while not task.done():
                if self._link.busy:
                    self._link.step()
                    await asyncio.sleep(0)  # those who wait for what it has brought come first
                else:
                    self._news.clear()
                    await self._news.wait()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            while self._link.busy and not self._client.open_streams:
                self._link.step()  # which still runs, although no request is left


class _Runner:
    """Runs coroutines in one event loop, one at a time: in the thread that asks, or in another one if a loop
    runs there already, as in notebooks. (Each call of `asyncio.Runner` writes all of its result as text.)"""

    def __init__(self) -> None:
        self._loop, self._lock = asyncio.new_event_loop(), threading.Lock()
        self._beside: ThreadPoolExecutor | None = None
        """The other thread, which stays: processes that it starts end with it."""
        self._task: asyncio.Task[Any] | None = None
        """What runs, or ran last."""
        self._interrupted = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns. An interrupt cancels it, and is raised once it has ended."""
        with self._lock:
            if asyncio._get_running_loop() is None:
                return self._run_here(work)
            self._beside = self._beside or ThreadPoolExecutor(1, "engine")
            future = self._beside.submit(self._run_here, work)
            try:
                return future.result()
            finally:
                if not future.done():
                    self._loop.call_soon_threadsafe(self._cancel)
                    wait([future])

    def close(self) -> None:
        self.run(self._end())
        self._loop.close()
        if self._beside is not None:
            self._beside.shutdown(wait=False)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    def _run_here(self, work: Coroutine[Any, Any, T]) -> T:
        task = self._task = self._loop.create_task(work)
        self._interrupted = False
        in_main = threading.current_thread() is threading.main_thread()
        catches = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if catches:
            signal.signal(signal.SIGINT, self._interrupt)
        try:
            result = self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            if self._interrupted:
                raise KeyboardInterrupt from None
            raise
        else:
            if self._interrupted:  # when all had been computed already
                raise KeyboardInterrupt
            return result
        finally:
            if catches:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupt(self, *_: object) -> None:
        if self._interrupted:  # once more, because the first had no effect yet
            raise KeyboardInterrupt
        self._interrupted = True
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _stop(runner: _Runner, engine: Engine, opened: list[Frontend]) -> None:
    """Called in any thread: where the collector finds an object that nobody has closed."""
    for frontend in opened:
        end_frontend(frontend, SHUT_DOWN)
    engine.stop()
    runner.close()
