"""The API process's side of long bodies: has them read by helper processes.

There are two of them, since one body can take a minute: bodies of more than LARGE bytes wait for each other
only.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from server.errors import BadRequest
from server.helpers.job import Ended, Job
from server.helpers.job_queue import Helpers
from server.helpers.messages import NO_MEMORY
from server.media.prompt import NO_MEDIA, LaidMedia, MediaNeeded
from server.model_facts import Facts
from server.reading.body_job import Answer, BodySetup, Needed, ReadingOrder
from server.reading.body_table import Reading
from server.reading.reading_context import ReadingOptions
from server.schemas.unknown_fields import FieldNotes
from server.text.template_sandbox import TemplateLimits
from server.text.tokenizer_files import TokenizerFiles

R = TypeVar("R")

LARGE = 1 << 20
"""The largest body in bytes that waits for no larger one."""


def _explain(_: ReadingOrder, ended: Ended) -> BadRequest | None:
    if ended.code is None:
        return BadRequest(
            f"Reading this request took more than {ended.seconds:.0f} seconds. Send less text, or fewer "
            "values, in one."
        )
    if ended.code == -signal.SIGALRM:
        return BadRequest(
            f"The chat template ran for more than {TemplateLimits().seconds:g} seconds on these messages, "
            "and was stopped. Send fewer of them, or use another template.",
            "chat_template",
        )
    if ended.code in (-signal.SIGABRT, -signal.SIGSEGV):  # as libraries end that get no memory
        return BadRequest(NO_MEMORY)
    return None


BODIES: Job[Answer] = Job(
    name="bodies",
    module="server.reading.body_job",
    answer=Answer,
    explain=_explain,
    memory=3 << 29,
    seconds=5.0,
    seconds_per_mib=2.5,
    waiting_bytes=128 << 20,
)


@dataclass(frozen=True, slots=True)
class ReadBody(Generic[R]):
    """A body whose texts have been read."""

    body: bytes
    """The body as JSON, with stand-ins for its texts."""
    result: R
    notes: FieldNotes


class LongBodies:
    """Has long bodies read."""

    def __init__(
        self,
        helpers: Helpers,
        source: Callable[[], TokenizerFiles],
        options: ReadingOptions,
        job: Job[Answer] = BODIES,
        template: TemplateLimits = TemplateLimits(),
    ) -> None:
        """`source` is asked for the tokenizer when a process is started."""

        def setup() -> BodySetup:
            return BodySetup(source(), options, template)

        self.small, self.large = helpers.open(job, setup), helpers.open(job, setup)

    async def read(
        self, reading: Reading[R], raw: bytes, facts: Facts, media: LaidMedia = NO_MEDIA, *, owner: str = ""
    ) -> ReadBody[R]:
        """Reads a body. Raises the error with which its request ends, or MediaNeeded."""
        queue = self.large if len(raw) > LARGE else self.small
        order = ReadingOrder(reading.name, facts, list(media.items()))
        return opened(reading, await queue.ask(order, raw, owner=owner))

    def start(self) -> None:
        """Starts the process for most long bodies, for which else the first of them waits."""
        self.small.start()


def opened(reading: Reading[R], answer: Answer) -> ReadBody[R]:
    """What an answer holds. Raises MediaNeeded if it names media."""
    if isinstance(answer, Needed):
        raise MediaNeeded(answer.parts, answer.salt, answer.settings, answer.io, answer.of_tools)
    return ReadBody(answer.body, msgspec.msgpack.decode(answer.result, type=reading.result), answer.notes)
