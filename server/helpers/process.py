"""The API process's end of one helper process, which is started with its first order, killed when an answer
is late, and started again for the next."""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from server.errors import Unavailable
from server.helpers.job import Ended, Job
from server.helpers.messages import HelperSetup
from worker import child
from worker.host.machine import environment_with

MODULE = "server.helpers.helper_process"
START_SECONDS = 60.0
ENDING_SECONDS = 2.0
"""Seconds from the end of the connection to that of the process, which tells the reason."""

Data = bytes | bytearray | memoryview
Received = bytearray | mmap.mmap

_LONG = 1 << 20
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""A variable for NumPy, whose threads take longer to wait for each other than to multiply what is here."""

_log = logging.getLogger(__name__)


class HelperProcess:
    """A helper process, or the place where it will be. It takes one order at a time."""

    def __init__(self, job: Job[Any], setup: Callable[[], msgspec.Struct], log_style: str) -> None:
        """`setup` makes what the job is opened with in a process that is started."""
        self._job, self._setup, self._log_style = job, setup, log_style
        self._child: child.Child | None = None
        self._connection: socket.socket

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return None if self._child is None or self._child.ended_within(0) else self._child.pid

    async def ask(self, order: bytes, data: Data) -> Received:
        """Sends an order and the bytes that it is about, and returns the answer.

        Raises Ended if the process ends meanwhile or is late, and Unavailable if it cannot be started.
        """
        seconds = self._job.seconds_for(len(data))
        while True:
            await self.start()
            try:
                async with asyncio.timeout(seconds):
                    await self._send(order)
                    await self._send(data)
                    return await self._receive()
            except asyncio.CancelledError:
                self.kill()  # its answer would be taken for that to the next order
                raise
            except TimeoutError:
                await self._end(0)
                raise Ended(seconds, None) from None
            except ConnectionError:
                code = await self._end(ENDING_SECONDS)
                if code != child.STOPPED:  # with that it ended by itself, before this order
                    raise Ended(seconds, code) from None

    async def start(self) -> None:
        """Starts the process, unless it runs. Raises Unavailable."""
        if self.pid is not None:
            return
        await self._end(0)
        try:
            self._open()
            async with asyncio.timeout(START_SECONDS):
                await self._receive()
        except asyncio.CancelledError:
            self.kill()
            raise
        except OSError as error:  # the end of the connection and a time-out are such, too
            code = await self._end(ENDING_SECONDS)
            why = str(error) if code is None else child.describe_exit(code)
            _log.error("the process for %s did not start: %s", self._job.name, why)
            reason = f"The process that reads {self._job.name} cannot be started. Try again later."
            raise Unavailable(reason, retry_after=5) from None

    def kill(self) -> int | None:
        """Ends the process at once, also where no event loop runs; returns its exit code if there was one."""
        if (ending := self._child) is None:
            return None
        self._child = None
        self._connection.close()
        ending.kill()
        return ending.wait()

    def _open(self) -> None:
        job = self._job
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                own, limits = msgspec.msgpack.encode(self._setup()), (job.memory, job.processor_seconds)
                setup = HelperSetup(theirs.fileno(), job.name, job.module, own, *limits, self._log_style)
                given = MODULE, msgspec.msgpack.encode(setup), [theirs.fileno()]
                self._child = child.start(job.name, *given, environment_with(**_ONE_THREAD))
        except BaseException:
            ours.close()
            raise
        self._connection = ours

    async def _end(self, seconds: float) -> int | None:
        """Kills the process, unless it ends by itself in so many seconds, and returns its exit code."""
        if self._child is None:
            return None
        self._connection.close()
        await asyncio.to_thread(self._child.ended_within, seconds)
        return await asyncio.to_thread(self.kill)

    async def _send(self, data: Data) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, len(data).to_bytes(child.LENGTH_BYTES, "little"))
        await loop.sock_sendall(self._connection, data)

    async def _receive(self) -> Received:
        head = await self._receive_exactly(child.LENGTH_BYTES)
        return await self._receive_exactly(int.from_bytes(head, "little"))

    async def _receive_exactly(self, count: int) -> Received:
        # A bytearray is filled with zeros first, which takes milliseconds for a long one.
        data = bytearray(count) if count < _LONG else mmap.mmap(-1, count)
        rest = memoryview(data)
        while rest:
            received = await asyncio.get_running_loop().sock_recv_into(self._connection, rest)
            if not received:
                raise ConnectionResetError("the process has ended")
            rest = rest[received:]
            if rest:
                await asyncio.sleep(0)  # while more has come already, receiving does not wait for anything
        return data
