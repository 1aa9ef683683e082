"""Restates a conversation in simpler forms for a template that refuses what a model or its tools wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count

import msgspec

from server.errors import BadRequest
from server.media.media_parts import MEDIA_PARTS, MediaPart, has_media, media_part
from server.media.prompt import Written
from server.model_facts import MediaFacts
from server.reading.system_messages import arranged, joined
from server.schemas.messages import Message, ToolCall
from server.schemas.repaired_history import WRITTEN
from server.text.chat_template import ChatTemplate

MEDIA_LEFT_OUT = "media in messages of tools left out, which the model does not take"
MEDIA_UNREAD = "media in messages of tools that could not be read, shown as text"
_WORDS: dict[str, str] = {"image": "picture", "audio": "sound", "video": "video"}
Write = Callable[[list[Message]], Written]


def write_restated(
    messages: list[Message],
    template: ChatTemplate,
    media: MediaFacts | None,
    write: Write,
    unread: Collection[MediaPart] = (),
) -> Written:
    """What `write` makes of the messages, in the first form that it takes. `unread` are the media of tools
    that could not be read."""
    roles = [message.role for message in messages]
    if ("system" in roles[1:] or "developer" in roles[1:]) and not template.takes_late_system:
        messages = arranged(messages, template)
    if not ("assistant" in roles or "tool" in roles or "function" in roles):
        return write(messages)
    shown, notes = fit_tool_media(messages, media, unread)
    refusals: list[BadRequest] = []
    for note, form in _forms(shown, template):
        try:
            written = write(form)
        except BadRequest as error:
            refusals.append(error)
            if refusals[0].param != "messages":
                break
        else:
            notes += [note] if note else []
            return msgspec.structs.replace(written, notes=notes) if notes else written
    raise refusals[0]


def _forms(messages: list[Message], template: ChatTemplate) -> Iterator[tuple[str, list[Message]]]:
    """Yields the conversation in simpler and simpler forms, and what is said of each that loses something."""
    yield "", messages
    messages = arranged(messages, template)
    yield "", with_text_arguments(messages)
    yield "messages arranged and ids of calls replaced for this chat template", with_short_ids(messages)
    yield "calls and their results shown as text to this chat template", as_texts(messages)


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of calls as JSON, for templates that write them as they are (DeepSeek
    V3). They are encoded twice, since arguments that are JSON become objects before a template gets them."""

    def written(call: ToolCall) -> ToolCall:
        text = json.dumps(json.dumps(call.function.arguments, ensure_ascii=False), ensure_ascii=False)
        return call.model_copy(update={"function": call.function.model_copy(update={"arguments": text})})

    calls = [[*map(written, message.tool_calls or ())] or None for message in messages]
    return [each.model_copy(update={"tool_calls": own}) for each, own in zip(messages, calls, strict=True)]


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with ids of nine digits, as some templates want them. A result that names no call is that
    of the first open one."""
    ids: dict[str, str] = {}
    waiting: list[str] = []
    numbers = (f"{number:09d}" for number in count(1))

    def renamed(call: ToolCall) -> ToolCall:
        waiting.append(next(numbers))
        ids[call.id or waiting[-1]] = waiting[-1]
        return call.model_copy(update={"id": waiting[-1]})

    def restate(message: Message) -> Message:
        if message.role == "tool":
            id = ids.get(message.tool_call_id or "") or (waiting[0] if waiting else next(numbers))
            waiting[:] = [each for each in waiting if each != id]
            return message.model_copy(update={"tool_call_id": id})
        calls = [*map(renamed, message.tool_calls or ())]
        return message.model_copy(update={"tool_calls": calls}) if calls else message

    return list(map(restate, messages))


def as_texts(messages: Sequence[Message], *, marked: bool = False) -> list[Message]:
    """The conversation as turns of the user and the assistant that alternate, with calls as text of the one
    and their results as text of the other.

    `marked`: in the form in which `tell_tools` describes them.
    """
    said: list[Message] = []
    for message in map(_as_marked if marked else _as_text, messages):
        if said and said[-1].role == message.role:
            content = joined([said[-1].content, message.content])
            said[-1] = said[-1].model_copy(update={"content": content})
            continue
        if message.role == "assistant" and (not said or said[-1].role == "system"):
            said.append(Message(role="user", content=""))
        said.append(message)
    return said


def _as_text(message: Message) -> Message:
    if message.role in ("tool", "function"):
        return Message(role="user", content=f"Result of {message.name or 'a tool'}:\n{message.text()}")
    if message.role != "assistant":
        return message
    calls = [call.function.model_dump(include={"name", "arguments"}) for call in message.tool_calls or ()]
    texts = [message.text(), *(json.dumps(call, ensure_ascii=False) for call in calls)]
    return Message(role="assistant", content="\n".join(filter(None, texts)))


def _as_marked(message: Message) -> Message:
    if message.role in ("tool", "function"):
        content = f"<tool_response>\n{message.text()}\n</tool_response>"
        if has_media(message.content):
            content = joined(["<tool_response>", message.content, "</tool_response>"])
        return Message(role="user", content=content)
    calls = [call.function.model_dump(include={"name", "arguments"}) for call in message.tool_calls or ()]
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = joined([message.content, *texts]) if message.content else "\n".join(texts)
    return message.model_copy(update={"content": content, "tool_calls": None}) if calls else message


def fit_tool_media(
    messages: list[Message], media: MediaFacts | None, unread: Collection[MediaPart]
) -> tuple[list[Message], list[str]]:
    """The messages with texts for media of tools that the model cannot get, and what is told of it."""
    shown, count = show_unread(messages, unread) if unread else (messages, 0)
    shown, left_out = fit_media(shown, {} if media is None else media.most)
    told = {MEDIA_UNREAD: count, MEDIA_LEFT_OUT: left_out}
    return shown, [f"{what} ({number})" for what, number in told.items() if number]


def show_unread(messages: list[Message], unread: Collection[MediaPart]) -> tuple[list[Message], int]:
    """The messages with a text in place of each of these media, and how many these are."""
    shown, count = [*messages], 0
    for index, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        parts = message.content.copy()
        for at, part in enumerate(parts):
            if (kind := MEDIA_PARTS.get(part["type"])) is not None and media_part(part) in unread:
                parts[at] = {"type": "text", "text": f"[{_WORDS[kind]} that could not be read]"}
                count += 1
        shown[index] = message.model_copy(update={"content": parts})
    return shown, count


def fit_media(messages: list[Message], most: Mapping[str, int]) -> tuple[list[Message], int]:
    """The messages without the oldest media of tools where there are more than the model takes, and how many
    are left out. Media of users have room first."""
    room, fitted, left_out = Counter[str](dict(most)), [*messages], 0
    for index in sorted(range(len(messages)), key=lambda at: (messages[at].role in WRITTEN, -at)):
        message = messages[index]
        if not isinstance(message.content, list):
            continue
        parts = message.content.copy()
        for at in reversed(range(len(parts))):
            if (kind := MEDIA_PARTS.get(parts[at]["type"])) is None:
                continue
            room[kind] -= 1
            if room[kind] < 0 and message.role in WRITTEN:
                parts[at] = {"type": "text", "text": f"({kind} left out)"}
                left_out += 1
        fitted[index] = message.model_copy(update={"content": parts})
    return fitted, left_out
