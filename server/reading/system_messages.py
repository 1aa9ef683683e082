"""Puts system messages where a template wants them, and describes tools in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.errors import BadRequest
from server.media.media_parts import Content, has_media
from server.schemas.messages import Message, Tool
from server.text.chat_template import ChatTemplate

TOLD_DIALECT = "hermes"

_TOLD = """{may} The tools, as JSON schemas:
<tools>
{tools}
</tools>
Call one by writing an object with its name and arguments, and nothing around it:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
{several} What a tool returns comes back between <tool_response> and </tool_response>."""
_MUST = "You answer by calling tools."
_MAY = "You can call tools. Call one where it helps, and otherwise answer in plain text."
_MANY, _ONE = "Write one such block for each call.", "Call one tool only."
_ASKED = "Facet asks whether this is written"


def tell_tools(
    messages: list[Message], tools: list[Tool], template: ChatTemplate, *, must: bool, several: bool
) -> list[Message]:
    """The conversation with the tools and the form of calls in its system message, or in the first message
    if the template writes none of the system.

    `must`: the answer has to be calls. `several`: there may be more than one.
    """
    described: list[dict[str, Any]] = [tool.for_template()["function"] for tool in tools]
    told = _TOLD.format(
        may=_MUST if must else _MAY,
        several=_MANY if several else _ONE,
        tools="\n".join(json.dumps(each, ensure_ascii=False) for each in described),
    )
    first, *rest = messages
    if first.role in ("system", "developer"):
        return [first.model_copy(update={"content": joined([first.content, told])}), *rest]
    if _takes_system(template):
        return [Message(role="system", content=told), *messages]
    if first.role != "user":
        return [Message(role="user", content=told), *messages]
    return [first.model_copy(update={"content": joined([told, first.content])}), *rest]


def _takes_system(template: ChatTemplate) -> bool:
    try:
        said = template.render([{"role": "system", "content": _ASKED}, {"role": "user", "content": "hi"}])
    except BadRequest:
        return False
    return _ASKED in said


def arranged(messages: Sequence[Message], template: ChatTemplate) -> list[Message]:
    """The messages with what the system says where the template wants it. Clients of these APIs have several
    such messages: instructions, a developer's, and some between the turns. Those at the beginning become one.
    The others join it where the template would drop or refuse them."""
    said = [message if template.knows_developer else _as_system(message) for message in messages]
    late = template.takes_late_system
    leading = next((index for index, message in enumerate(said) if message.role != "system"), len(said))
    first = said[:leading] + ([] if late else [each for each in said[leading:] if each.role == "system"])
    rest = said[leading:] if late else [each for each in said[leading:] if each.role != "system"]
    if len(first) > 1:
        first = [Message(role="system", content=joined([message.content for message in first]))]
    return [*first, *rest]


def joined(contents: Sequence[Content]) -> Content:
    """Contents as one: a text, or parts if there are media."""
    if any(map(has_media, contents)):
        return [part for each in contents for part in _parts(each)]
    return "\n\n".join("\n".join(part["text"] for part in _parts(each)) for each in contents)


def _parts(content: Content) -> list[dict[str, str]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _as_system(message: Message) -> Message:
    return message.model_copy(update={"role": "system"}) if message.role == "developer" else message
