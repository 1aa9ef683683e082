"""Reads long bodies in a helper process.

Whatever a client has written is read there within bounds of time and memory; the kernel ends the process when
a chat template runs for too long.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
from pydantic import TypeAdapter

from server.errors import ApiError, BadRequest
from server.helpers.memory import set_most_memory, unset_most_memory
from server.helpers.messages import FollowOrder, to_msgpack
from server.media.media_parts import MediaPart
from server.media.prompt import Laid, MediaNeeded
from server.model_facts import Facts
from server.reading.body_table import BY_NAME, Reading
from server.reading.prompts import Prompt
from server.reading.reading_context import ReadingContext, ReadingOptions
from server.requests.pooling import PooledText
from server.schemas.body import Body, read_json
from server.schemas.unknown_fields import FieldNotes, in_clients_words
from server.text.chat_template import ChatTemplate
from server.text.template_sandbox import TemplateLimits
from server.text.tokenizer import pack
from server.text.tokenizer_files import TokenizerFiles

TOKENIZER_THREADS = 4
"""The most threads of the tokenizer: the engine needs the other cores."""
MOST_LEFT = 2 << 20
"""The most bytes of a body without its texts: a list of all ids of a vocabulary has one million."""


class BodySetup(msgspec.Struct, frozen=True):
    """The settings with which the job is opened."""

    tokenizer: TokenizerFiles
    options: ReadingOptions
    template: TemplateLimits


class ReadingOrder(msgspec.Struct, frozen=True):
    """An order to read a body."""

    reading: str
    """The name of an entry of `server.reading.body_table`."""
    facts: Facts
    media: list[tuple[MediaPart, Laid]] = []
    """The items of the request that are prepared."""


class Done(msgspec.Struct, frozen=True, tag=True):
    body: bytes
    """The body as JSON, with stand-ins for its texts."""
    result: msgspec.Raw
    notes: FieldNotes
    """What was found out about the names of the body's fields."""


class Needed(msgspec.Struct, frozen=True, tag=True):
    """The items that have to be prepared before the body can be read."""

    parts: list[MediaPart]
    salt: str
    settings: dict[str, Any]
    io: dict[str, Any]
    of_tools: list[MediaPart] = []
    """The items that may turn out to be unreadable."""


Answer = Done | Needed


def open_job(data: bytes) -> FollowOrder:
    setup = msgspec.msgpack.decode(data, type=BodySetup)
    os.putenv("RAYON_NUM_THREADS", str(min(TOKENIZER_THREADS, os.cpu_count() or 1)))
    tokenizer = setup.tokenizer.load(partial(BoundedTemplate, limits=setup.template))
    tokenizer.encode_many(["warm up the threads"] * 64)
    gc.disable()  # values of JSON make no cycles, and to look for some takes longer than to read them
    gc.freeze()

    def read(order: bytes, raw: bytes) -> Answer:
        asked = msgspec.msgpack.decode(order, type=ReadingOrder)
        own = tokenizer.written_by(asked.facts.chat_template)
        context = ReadingContext(asked.facts, own, setup.options, dict(asked.media))
        return read_body(BY_NAME[asked.reading], raw, context)

    return read


def read_body(reading: Reading[Any], raw: bytes, context: ReadingContext) -> Answer:
    """Reads a body. Raises the ApiError with which its request ends."""
    notes = FieldNotes(context.options.strict_fields)
    try:
        body: Body = read_json(raw, _validator(reading.name), notes)
        result = to_msgpack(_packed(reading.read(body, context)))
    except MediaNeeded as needed:
        return Needed(needed.parts, needed.salt, needed.settings, needed.io, needed.of_tools)
    except ApiError as error:
        in_clients_words(error, notes.client_names)
        raise
    left = json.dumps(body.without_texts(), ensure_ascii=False).encode("utf-8", "surrogatepass")
    if len(left) > MOST_LEFT:
        raise BadRequest(f"The fields beside the texts may have at most {MOST_LEFT} bytes, got {len(left)}.")
    return Done(left, msgspec.Raw(result), notes)


@cache
def _validator(name: str) -> Callable[..., Any]:
    return TypeAdapter(BY_NAME[name].body).validate_python


def _packed(value: Any) -> Any:
    """What was read, with token ids in the form that takes least."""
    match value:
        case PooledText():
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

    def __init__(self, *arguments: Any, limits: TemplateLimits) -> None:
        super().__init__(*arguments)
        self._limits = limits

    def render(self, *arguments: Any, **options: Any) -> str:
        set_most_memory(self._limits.memory)
        signal.setitimer(signal.ITIMER_REAL, self._limits.seconds)
        try:
            return super().render(*arguments, **options)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            unset_most_memory()
