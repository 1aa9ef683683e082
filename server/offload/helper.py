"""The API process's side of its helpers: sends them long bodies, and ends one that takes too long.

A helper is started with the first long body, so that a server that never gets one has no such process. There
are two of them, since one body can take a minute: bodies of more than LARGE bytes wait for each other only.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from server.errors import ApiError, BadRequest, Overloaded, Unavailable
from server.offload.messages import (
    LENGTH_BYTES,
    NO_MEMORY,
    Answer,
    HelperLimits,
    Job,
    Refused,
    Setup,
    Started,
    frame,
    refused,
)
from server.reading.reader import ReadingOptions
from server.reading.table import Reading
from server.requests.facts import Facts
from server.text.tokenizer_source import TokenizerSource
from worker import child

R = TypeVar("R")

MODULE = "server.offload.process"

LARGE = 1 << 20
"""The largest body in bytes that waits for no larger one."""

ENDING_SECONDS = 2.0
"""Seconds from the end of the connection to that of the process, which tells the reason."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadBody(Generic[R]):
    """A body whose texts have been read."""

    body: bytes
    """The body as JSON, with stand-ins for its texts."""
    result: R


class Helper:
    """Reads long bodies in processes of its own."""

    def __init__(
        self,
        source: Callable[[], TokenizerSource],
        options: ReadingOptions,
        limits: HelperLimits = HelperLimits(),
        log_level: str = "info",
    ) -> None:
        """`source` is asked for the tokenizer when a process is started."""

        def setup(descriptor: int) -> Setup:
            return Setup(descriptor, source(), options, limits, log_level)

        self._small, self._large = _Queue(setup, limits), _Queue(setup, limits)

    async def read(self, reading: Reading[R], raw: bytes, facts: Facts) -> ReadBody[R]:
        """Reads a body. Raises the error with which its request ends."""
        queue = self._large if len(raw) > LARGE else self._small
        return opened(reading, await queue.read(Job(reading.name, facts), raw))

    async def close(self) -> None:
        """Ends the processes."""
        for queue in (self._small, self._large):
            await queue.close()


def opened(reading: Reading[R], answer: Answer) -> ReadBody[R]:
    """What an answer holds. Raises the error that it holds in place of it."""
    if isinstance(answer, Refused):
        raise _Refusal(answer)
    return ReadBody(answer.body, msgspec.msgpack.decode(answer.result, type=reading.result))


class _Entry(msgspec.Struct):
    """A body in a queue."""

    job: Job
    raw: bytes
    left: bool = False
    """Whether nobody waits for it any more."""


class _Queue:
    """One process, and the bodies that wait for it."""

    def __init__(self, setup: Callable[[int], Setup], limits: HelperLimits) -> None:
        self._setup = setup
        self._limits = limits
        self._process: _Process | None = None
        self._free = asyncio.Lock()
        self._bytes = 0
        """Bytes of all bodies that are being read or wait."""

    async def read(self, job: Job, raw: bytes) -> Answer:
        if self._bytes and self._bytes + len(raw) > self._limits.waiting_bytes:
            raise Overloaded(
                "The server is reading as many long requests as it can. Try again later, or send less text "
                "in one request.",
                retry_after=1,
            )
        entry = _Entry(job, raw)
        try:
            # One that is being read is read to its end though its client has left: to start the process again
            # would cost more.
            return await asyncio.shield(asyncio.create_task(self._read(entry)))
        except asyncio.CancelledError:
            entry.left = True
            raise

    async def close(self) -> None:
        async with self._free:
            if self._process is not None:
                await self._end(self._process)

    async def _read(self, entry: _Entry) -> Answer:
        self._bytes += len(entry.raw)
        try:
            async with self._free:
                return refused(_gone()) if entry.left else await self._ask(entry)
        finally:
            self._bytes -= len(entry.raw)

    async def _ask(self, entry: _Entry) -> Answer:
        seconds = self._limits.seconds_for(len(entry.raw))
        while True:
            process = await self._running()
            if process is None:
                return refused(_gone())
            try:
                async with asyncio.timeout(seconds):
                    return await process.ask(entry.job, entry.raw)
            except TimeoutError:
                _log.warning("reading a body of %d bytes took more than %.0f s", len(entry.raw), seconds)
                await self._end(process)
                return refused(_too_slow(seconds))
            except ConnectionError:
                code = await self._end(process, ENDING_SECONDS)
                if code != child.STOPPED:  # with that it ended by itself, before this body
                    _log.warning("reading a body of %d bytes: %s", len(entry.raw), child.describe_exit(code))
                    return refused(_explain(code, self._limits))

    async def _running(self) -> _Process | None:
        """The process, which is started if there is none; None if that fails."""
        if self._process is not None and self._process.has_ended:
            await self._end(self._process)
        if self._process is None:
            self._process = await self._start()
        return self._process

    async def _start(self) -> _Process | None:
        try:
            process = _Process(self._setup)
        except OSError as error:
            _log.error("the process that reads long bodies cannot be started: %s", error)
            return None
        try:
            async with asyncio.timeout(self._limits.start_seconds):
                await process.started()
        except (ConnectionError, TimeoutError):
            code = await self._end(process, ENDING_SECONDS)
            _log.error("the process that reads long bodies did not start: %s", child.describe_exit(code))
            return None
        return process

    async def _end(self, process: _Process, seconds: float = 0.0) -> int:
        self._process = None
        return await process.end(seconds)


class _Process:
    """A running helper."""

    def __init__(self, setup: Callable[[int], Setup]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        try:
            with theirs:
                payload = msgspec.msgpack.encode(setup(theirs.fileno()))
                self._child = child.start("helper", MODULE, payload, [theirs.fileno()])
        except OSError:
            self._connection.close()
            raise

    @property
    def has_ended(self) -> bool:
        return self._child.ended_within(0)

    async def started(self) -> None:
        msgspec.msgpack.decode(await self._receive(), type=Started)

    async def ask(self, job: Job, raw: bytes) -> Answer:
        await self._loop.sock_sendall(self._connection, frame(msgspec.msgpack.encode(job)))
        await self._loop.sock_sendall(self._connection, len(raw).to_bytes(LENGTH_BYTES, "little"))
        await self._loop.sock_sendall(self._connection, raw)
        return msgspec.msgpack.decode(await self._receive(), type=Answer)

    async def end(self, seconds: float) -> int:
        """Kills the process, unless it ends by itself in so many seconds, and returns its exit code."""
        self._connection.close()
        if not await asyncio.to_thread(self._child.ended_within, seconds):
            self._child.kill()
        return await asyncio.to_thread(self._child.wait)

    async def _receive(self) -> bytes:
        head = await self._receive_exactly(LENGTH_BYTES)
        return await self._receive_exactly(int.from_bytes(head, "little"))

    async def _receive_exactly(self, count: int) -> bytes:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            received = await self._loop.sock_recv_into(self._connection, rest)
            if not received:
                raise ConnectionResetError("the helper has ended")
            rest = rest[received:]
        return bytes(data)


class _Refusal(ApiError):
    """The error that a helper found."""

    def __init__(self, found: Refused) -> None:
        super().__init__(found.message, found.param, retry_after=found.retry_after)
        self.status = found.status
        self.type = found.kind


def _too_slow(seconds: float) -> BadRequest:
    return BadRequest(
        f"Reading this request took more than {seconds:.0f} seconds. Send less text, or fewer values, in one."
    )


def _explain(code: int, limits: HelperLimits) -> ApiError:
    """The error for a body at which the process ended."""
    if code == -signal.SIGALRM:
        return BadRequest(
            f"The chat template ran for more than {limits.template_seconds:g} seconds on these messages, and "
            "was stopped. Send fewer of them, or use another template.",
            "chat_template",
        )
    if code in (-signal.SIGABRT, -signal.SIGSEGV):  # as libraries end that get no memory
        return BadRequest(NO_MEMORY)
    return _gone()


def _gone() -> Unavailable:
    return Unavailable("The process that reads long requests ended. Send this one again.", retry_after=1)
