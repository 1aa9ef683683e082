"""The API process's side of its helpers: sends them long bodies, and ends one that takes too long.

A helper is started with the first long body, so that a server that never gets one has no such process. There
are two of them, since one body can take a minute: bodies of more than LARGE bytes wait for each other only.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from server.errors import ApiError, BadRequest, Overloaded, Unavailable
from server.model_facts import Facts
from server.offload.answering_process import AnsweringProcess, CannotStart, Ended
from server.offload.refused import NO_MEMORY, Refusal, Refused, refused
from server.reading.helper_messages import Answer, HelperLimits, Job, Setup
from server.reading.reader import ReadingOptions
from server.reading.readings import Reading
from server.text.tokenizer_files import TokenizerFiles

R = TypeVar("R")

MODULE = "server.reading.helper_process"

LARGE = 1 << 20
"""The largest body in bytes that waits for no larger one."""

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
        source: Callable[[], TokenizerFiles],
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
        raise Refusal(answer)
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
        self._limits = limits
        self._process = AnsweringProcess(
            "helper", MODULE, lambda at: msgspec.msgpack.encode(setup(at)), limits.start_seconds
        )
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
            await self._process.close()

    async def _read(self, entry: _Entry) -> Answer:
        self._bytes += len(entry.raw)
        try:
            async with self._free:
                return refused(_gone()) if entry.left else await self._ask(entry)
        finally:
            self._bytes -= len(entry.raw)

    async def _ask(self, entry: _Entry) -> Answer:
        seconds, size = self._limits.seconds_for(len(entry.raw)), len(entry.raw)
        try:
            answer = await self._process.ask([msgspec.msgpack.encode(entry.job), entry.raw], seconds)
        except CannotStart:
            return refused(_gone())
        except TimeoutError:
            _log.warning("reading a body of %d bytes took more than %.0f s", size, seconds)
            return refused(_too_slow(seconds))
        except Ended as ended:
            _log.warning("reading a body of %d bytes: %s", size, ended)
            return refused(_explain(ended.code, self._limits))
        return msgspec.msgpack.decode(answer, type=Answer)


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
