"""The helper, `python -m server.reading.helper_process FD`: reads long bodies for an API process, in turn.

Whatever a client has written is read here within bounds of time and memory that the operating system keeps:
the API process kills this one when a body takes too long, and the kernel does when a chat template does.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
from pydantic import TypeAdapter

from server.api.fields import Body, read_json, unknown_fields
from server.errors import ApiError, BadRequest, Internal
from server.media.parts import MediaPart
from server.media.prompt import Laid, MediaNeeded
from server.model_facts import Facts
from server.offload.messages import (
    NO_MEMORY,
    SentError,
    answer_questions,
    sent_error,
    set_most_memory,
    unset_most_memory,
)
from server.reading.body_table import BY_NAME, Reading
from server.reading.prompts import Prompt, ReadingContext, ReadingOptions
from server.requests.pooling import Item
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import pack
from server.text.tokenizer_files import TokenizerFiles
from worker import child, logs

TOKENIZER_THREADS = 4
"""The most threads of the tokenizer: the engine needs the other cores."""
MOST_LEFT = 2 << 20
"""The most bytes of a body without its texts: a list of all ids of a vocabulary has one million."""

MUCH = 8 << 20
"""Bytes left of a body that are given back to the system."""

_log = logging.getLogger(__name__)


class HelperLimits(msgspec.Struct, frozen=True):
    """What reading one body may take. It is killed that takes more."""

    seconds: float = 5.0
    """Seconds for any body; and for each MiB of a long one so many more:"""
    seconds_per_mib: float = 2.5
    memory: int = 3 << 29
    """Bytes of address space beyond those that the process has when it waits for bodies. Allocators reserve
    some hundred megabytes that they do not use."""
    template_seconds: float = 2.0
    """Seconds for one conversation, of those."""
    template_memory: int = 256 << 20
    kept_memory: int = 128 << 20
    """The process ends after a body of which so many bytes are left: some libraries give back little."""
    start_seconds: float = 60.0
    waiting_bytes: int = 128 << 20
    """Bytes of all bodies together that wait for the process."""

    def seconds_for(self, size: int) -> float:
        return self.seconds + self.seconds_per_mib * size / (1 << 20)


class HelperSetup(msgspec.Struct, frozen=True):
    """What a helper is started with."""

    socket: int
    """The inherited descriptor of its end of the connection."""
    tokenizer: TokenizerFiles
    options: ReadingOptions
    limits: HelperLimits
    log_level: str


class ReadingOrder(msgspec.Struct, frozen=True):
    """An order to read a body, which follows in a frame of its own, as bytes."""

    reading: str
    """The name of an entry of `server.reading.body_table`."""
    facts: Facts
    media: list[tuple[MediaPart, Laid]] = []
    """The items of the request that are prepared."""


class Done(msgspec.Struct, frozen=True, tag=True):
    body: bytes
    """The body as JSON, with stand-ins for its texts."""
    result: msgspec.Raw


class Needed(msgspec.Struct, frozen=True, tag=True):
    """The items that have to be prepared before the body can be read."""

    parts: list[MediaPart]
    salt: str
    settings: dict[str, Any]
    io: dict[str, Any]


Answer = Done | Needed | SentError


def main() -> int:
    setup = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=HelperSetup)
    logs.setup("helper", setup.log_level)
    os.putenv("RAYON_NUM_THREADS", str(min(TOKENIZER_THREADS, os.cpu_count() or 1)))
    limits = setup.limits
    tokenizer = setup.tokenizer.load(partial(BoundedTemplate, limits=limits))
    tokenizer.encode_many(["warm up the threads"] * 64)
    gc.disable()  # values of JSON make no cycles, and to look for some takes longer than to read them
    gc.freeze()

    def read(order: bytes, raw: bytes) -> bytes:
        asked = msgspec.msgpack.decode(order, type=ReadingOrder)
        own = tokenizer.written_by(asked.facts.chat_template)
        context = ReadingContext(asked.facts, own, setup.options, dict(asked.media))
        return msgspec.msgpack.encode(answer(BY_NAME[asked.reading], raw, context))

    with socket.socket(fileno=setup.socket) as connection:
        answer_questions(connection, 2, read, memory=limits.memory, much=MUCH, most=limits.kept_memory)
    return child.STOPPED


def answer(reading: Reading[Any], raw: bytes, context: ReadingContext) -> Answer:
    try:
        body: Body = read_json(
            raw, _validator(reading.name), unknown_fields(context.options.ignore_unknown_fields)
        )
        result = msgspec.msgpack.encode(_packed(reading.read(body, context)))
        left = json.dumps(body.without_texts(), ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(left) > MOST_LEFT:
            raise BadRequest(
                f"The fields beside the texts may have at most {MOST_LEFT} bytes, got {len(left)}."
            )
    except MediaNeeded as needed:
        return Needed(needed.parts, needed.salt, needed.settings, needed.io)
    except ApiError as error:
        return sent_error(error)
    except MemoryError:
        return sent_error(BadRequest(NO_MEMORY))
    except Exception:
        _log.exception("a body could not be read")
        return sent_error(Internal("Internal server error"))
    return Done(left, msgspec.Raw(result))


@cache
def _validator(name: str) -> Callable[..., Any]:
    return TypeAdapter(BY_NAME[name].body).validate_python


def _packed(value: Any) -> Any:
    """What was read, with token ids in the form that takes least."""
    match value:
        case Item():
            return msgspec.structs.replace(value, tokens=pack(value.tokens))
        case Prompt():
            return msgspec.structs.replace(value, ids=pack(value.ids))
        case msgspec.Struct():
            fields = {name: _packed(getattr(value, name)) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
        case list():
            return [_packed(one) for one in value]
        case _:
            return value


class BoundedTemplate(ChatTemplate):
    """Chat templates that the kernel ends, with this process, when one runs for too long. One that takes too
    much memory gets a MemoryError."""

    def __init__(self, *arguments: Any, limits: HelperLimits) -> None:
        super().__init__(*arguments)
        self._limits = limits

    def render(self, *arguments: Any, **options: Any) -> str:
        set_most_memory(self._limits.template_memory)
        signal.setitimer(signal.ITIMER_REAL, self._limits.template_seconds)
        try:
            return super().render(*arguments, **options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            unset_most_memory()


if __name__ == "__main__":
    sys.exit(main())
