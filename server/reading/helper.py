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
from server.media.prompt import NO_MEDIA, LaidMedia, MediaNeeded
from server.model_facts import Facts
from server.offload.answering_process import AnsweringProcess, CannotStart, Ended
from server.offload.messages import NO_MEMORY, ReceivedError, SentError, sent_error
from server.reading.body_table import Reading
from server.reading.helper_process import Answer, HelperLimits, HelperSetup, Needed, ReadingOrder
from server.reading.prompts import ReadingOptions
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

        def setup(descriptor: int) -> bytes:
            return msgspec.msgpack.encode(HelperSetup(descriptor, source(), options, limits, log_level))

        self._small, self._large = _Queue(setup, limits), _Queue(setup, limits)
        self._early: asyncio.Task[None] | None = None

    async def read(
        self, reading: Reading[R], raw: bytes, facts: Facts, media: LaidMedia = NO_MEDIA
    ) -> ReadBody[R]:
        """Reads a body. Raises the error with which its request ends, or MediaNeeded."""
        queue = self._large if len(raw) > LARGE else self._small
        order = ReadingOrder(reading.name, facts, list(media.items()))
        return opened(reading, await queue.read(msgspec.msgpack.encode(order), raw))

    def start(self) -> None:
        """Starts the process for most long bodies, for which else the first of them waits."""
        self._early = asyncio.create_task(self._small.start())

    async def close(self) -> None:
        """Ends the processes."""
        for queue in (self._small, self._large):
            await queue.close()


def opened(reading: Reading[R], answer: Answer) -> ReadBody[R]:
    """What an answer holds. Raises the error that it holds in place of it."""
    if isinstance(answer, SentError):
        raise ReceivedError(answer)
    if isinstance(answer, Needed):
        raise MediaNeeded(answer.parts, answer.salt, answer.settings, answer.io)
    return ReadBody(answer.body, msgspec.msgpack.decode(answer.result, type=reading.result))


class _Queue:
    """One process, and the bodies that wait for it."""

    def __init__(self, setup: Callable[[int], bytes], limits: HelperLimits) -> None:
        self._limits = limits
        self._process = AnsweringProcess("helper", MODULE, setup, limits.start_seconds)
        self._free = asyncio.Lock()
        self._bytes = 0
        """Bytes of all bodies that are being read or wait."""

    async def read(self, order: bytes, raw: bytes) -> Answer:
        if self._bytes and self._bytes + len(raw) > self._limits.waiting_bytes:
            raise Overloaded(
                "The server is reading as many long requests as it can. Try again later, or send less text "
                "in one request.",
                retry_after=1,
            )
        client_left = asyncio.Event()
        try:
            # One that is being read is read to its end though its client has left: to start the process again
            # would cost more.
            return await asyncio.shield(asyncio.create_task(self._read(order, raw, client_left)))
        except asyncio.CancelledError:
            client_left.set()
            raise

    async def start(self) -> None:
        async with self._free:
            await self._process.start()

    async def close(self) -> None:
        async with self._free:
            await self._process.close()

    async def _read(self, order: bytes, raw: bytes, client_left: asyncio.Event) -> Answer:
        self._bytes += len(raw)
        try:
            async with self._free:
                return sent_error(_gone()) if client_left.is_set() else await self._ask(order, raw)
        finally:
            self._bytes -= len(raw)

    async def _ask(self, order: bytes, raw: bytes) -> Answer:
        seconds = self._limits.seconds_for(len(raw))
        try:
            answer = await self._process.ask([order, raw], seconds)
        except CannotStart:
            return sent_error(_gone())
        except TimeoutError:
            _log.warning("reading a body of %d bytes took more than %.0f s", len(raw), seconds)
            error = BadRequest(
                f"Reading this request took more than {seconds:.0f} seconds. Send less text, or fewer "
                "values, in one."
            )
            return sent_error(error)
        except Ended as ended:
            _log.warning("reading a body of %d bytes: %s", len(raw), ended)
            return sent_error(_explain(ended.code, self._limits))
        return msgspec.msgpack.decode(answer, type=Answer)


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
