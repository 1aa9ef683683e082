"""A process that answers questions, one after the other, within bounds of time: started with the first
question, killed when an answer is late, and started again for the next."""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from server.offload.messages import LENGTH_BYTES
from worker import child
from worker.host.machine import environment_with

ENDING_SECONDS = 2.0
"""Seconds from the end of the connection to that of the process, which tells the reason."""

Frame = bytes | bytearray | memoryview
Received = bytearray | mmap.mmap

_LONG = 1 << 20
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""A variable for NumPy, whose threads take longer to wait for each other than to multiply what is here."""

_log = logging.getLogger(__name__)


class CannotStart(Exception):
    """The process cannot be started; the log says why."""


class Ended(Exception):
    """The process has ended at a question."""

    def __init__(self, code: int) -> None:
        super().__init__(child.describe_exit(code))
        self.code = code


class AnsweringProcess:
    """The process, or the place where it will be. It takes one question at a time."""

    def __init__(
        self, name: str, module: str, setup: Callable[[int], bytes], start_seconds: float = 60.0
    ) -> None:
        """`setup` makes what the process is started with, of the descriptor of its end of the connection.

        Its first frame says that it can answer, after `start_seconds` at most.
        """
        self._name = name
        self._module = module
        self._setup = setup
        self._start_seconds = start_seconds
        self._process: _Running | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        if self._process is None or self._process.has_ended:
            return None
        return self._process.pid

    async def ask(self, frames: Sequence[Frame], seconds: float) -> Received:
        """The answer to a question, which is some frames.

        Raises CannotStart, Ended, or TimeoutError after so many seconds; the process is gone then.
        """
        while True:
            process = await self._running()
            try:
                async with asyncio.timeout(seconds):
                    return await process.ask(frames)
            except asyncio.CancelledError:
                self.kill()  # its answer would be taken for that to the next question
                raise
            except TimeoutError:
                await self._end(process)
                raise
            except ConnectionError:
                code = await self._end(process, ENDING_SECONDS)
                if code != child.STOPPED:  # with that it ended by itself, before this question
                    raise Ended(code) from None

    async def start(self) -> None:
        """Starts the process before the first question; if it cannot be, that is met again."""
        with suppress(CannotStart):
            await self._running()

    async def close(self) -> None:
        if self._process is not None:
            await self._end(self._process)

    def kill(self) -> None:
        """Ends the process at once, also where no event loop runs any more."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    async def _running(self) -> _Running:
        if self._process is not None and self._process.has_ended:
            await self._end(self._process)
        if self._process is None:
            self._process = await self._start()
        return self._process

    async def _start(self) -> _Running:
        try:
            process = _Running(self._name, self._module, self._setup)
        except OSError as error:
            _log.error("the process '%s' cannot be started: %s", self._name, error)
            raise CannotStart from error
        try:
            async with asyncio.timeout(self._start_seconds):
                await process.receive()
        except (ConnectionError, TimeoutError):
            code = await self._end(process, ENDING_SECONDS)
            _log.error("the process '%s' did not start: %s", self._name, child.describe_exit(code))
            raise CannotStart from None
        except asyncio.CancelledError:
            process.kill()
            raise
        return process

    async def _end(self, process: _Running, seconds: float = 0.0) -> int:
        self._process = None
        return await process.end(seconds)


class _Running:
    """A running process."""

    def __init__(self, name: str, module: str, setup: Callable[[int], bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        try:
            with theirs:
                payload, alone = setup(theirs.fileno()), environment_with(**_ONE_THREAD)
                self._child = child.start(name, module, payload, [theirs.fileno()], alone)
        except OSError:
            self._connection.close()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        return self._child.ended_within(0)

    async def ask(self, frames: Sequence[Frame]) -> Received:
        for data in frames:
            await self._loop.sock_sendall(self._connection, len(data).to_bytes(LENGTH_BYTES, "little"))
            await self._loop.sock_sendall(self._connection, data)
        return await self.receive()

    def kill(self) -> None:
        self._connection.close()
        self._child.kill()
        self._child.wait()

    async def end(self, seconds: float) -> int:
        """Kills the process, unless it ends by itself in so many seconds, and returns its exit code."""
        self._connection.close()
        if not await asyncio.to_thread(self._child.ended_within, seconds):
            self._child.kill()
        return await asyncio.to_thread(self._child.wait)

    async def receive(self) -> Received:
        head = await self._receive_exactly(LENGTH_BYTES)
        return await self._receive_exactly(int.from_bytes(head, "little"))

    async def _receive_exactly(self, count: int) -> Received:
        # A bytearray is filled with zeros first, which takes milliseconds for a long one.
        data = bytearray(count) if count < _LONG else mmap.mmap(-1, count)
        rest = memoryview(data)
        while rest:
            received = await self._loop.sock_recv_into(self._connection, rest)
            if not received:
                raise ConnectionResetError("the process has ended")
            rest = rest[received:]
            if rest:
                await asyncio.sleep(0)  # while more has come already, receiving does not wait for anything
        return data
