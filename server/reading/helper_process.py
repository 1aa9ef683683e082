"""The helper, `python -m server.reading.helper_process FD`: reads long bodies for an API process, in turn.

Whatever a client has written is read here within bounds of time and memory that the operating system keeps:
the API process kills this one when a body takes too long, and the kernel does when a chat template does.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import msgspec
from pydantic import TypeAdapter

from server.api.fields import Body, unknown_fields
from server.api.json_body import read_json
from server.errors import ApiError, BadRequest, Internal
from server.offload.frames import frame, receive_frame
from server.offload.memory import give_back, resident, set_most_memory, unset_most_memory
from server.offload.refused import NO_MEMORY, refused
from server.reading.helper_messages import (
    Answer,
    Done,
    HelperLimits,
    Job,
    Setup,
    Started,
)
from server.reading.prompts import Prompt
from server.reading.reader import Reader
from server.reading.readings import BY_NAME, Reading
from server.requests.pooling import Item
from server.text.chat_template import AskedFormat, ChatTemplate
from server.text.tokenizer import pack
from worker import child, logs

TOKENIZER_THREADS = 4
"""The most threads of the tokenizer: the engine needs the other cores."""
MOST_LEFT = 2 << 20
"""The most bytes of a body without its texts: a list of all ids of a vocabulary has one million."""

MUCH = 8 << 20
"""Bytes left of a body that are given back to the system."""

_log = logging.getLogger(__name__)


def main() -> int:
    setup = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=Setup)
    logs.setup("helper", setup.log_level)
    os.putenv("RAYON_NUM_THREADS", str(min(TOKENIZER_THREADS, os.cpu_count() or 1)))
    with socket.socket(fileno=setup.socket) as connection:
        _serve(connection, setup)
    return child.STOPPED


def _serve(connection: socket.socket, setup: Setup) -> None:
    limits = setup.limits
    tokenizer = setup.tokenizer.load(partial(BoundedTemplate, limits=limits))
    tokenizer.encode_many(["warm up the threads"] * 64)
    gc.disable()  # values of JSON make no cycles, and to look for some takes longer than to read them
    gc.freeze()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_most_memory(limits.memory, for_good=True)
    at_rest = resident()
    connection.sendall(frame(msgspec.msgpack.encode(Started())))
    while (order := receive_frame(connection)) is not None and (raw := receive_frame(connection)) is not None:
        job = msgspec.msgpack.decode(order, type=Job)
        reader = Reader(job.facts, tokenizer, setup.options)
        connection.sendall(frame(msgspec.msgpack.encode(answer(BY_NAME[job.reading], raw, reader))))
        del order, raw, job, reader
        if resident() > at_rest + MUCH:
            give_back()
        if resident() > at_rest + limits.kept_memory:
            return


def answer(reading: Reading[Any], raw: bytes, reader: Reader) -> Answer:
    try:
        body: Body = read_json(
            raw, _validator(reading.name), unknown_fields(reader.options.ignore_unknown_fields)
        )
        result = msgspec.msgpack.encode(_packed(reading.read(body, reader)))
        left = json.dumps(body.without_texts(), ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(left) > MOST_LEFT:
            raise BadRequest(
                f"The fields beside the texts may have at most {MOST_LEFT} bytes, got {len(left)}."
            )
    except ApiError as error:
        return refused(error)
    except MemoryError:
        return refused(BadRequest(NO_MEMORY))
    except Exception:
        _log.exception("a body could not be read")
        return refused(Internal("Internal server error"))
    return Done(left, msgspec.Raw(result))


@cache
def _validator(name: str) -> Callable[..., Any]:
    return TypeAdapter(BY_NAME[name].body).validate_python


def _packed(value: Any) -> Any:
    """What was read, with token ids in the form that takes least."""
    match value:
        case Item():
            return Item(pack(value.tokens), value.params)
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
    """Chat templates that the kernel ends, with this process, when one runs for too long.

    One that takes too much memory gets a MemoryError.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        content_format: AskedFormat = "auto",
        *,
        limits: HelperLimits,
    ) -> None:
        super().__init__(templates, special_tokens, content_format)
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
