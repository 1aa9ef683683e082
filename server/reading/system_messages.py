"""Puts system messages where a template wants them, and tells tools in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.media.media_parts import Content, has_media
from server.schemas.messages import Message, Tool
from server.text.chat_template import ChatTemplate

TOLD_DIALECT = "hermes"

_TOLD = """You answer by calling tools. The tools, as JSON schemas:
<tools>
{tools}
</tools>
Call one by writing an object with its name and arguments, and nothing around it:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def tell_tools(messages: list[Message], tools: list[Tool]) -> list[Message]:
    """The conversation with the tools and the form of calls in its system message."""
    described: list[dict[str, Any]] = [tool.for_template()["function"] for tool in tools]
    told = _TOLD.format(tools="\n".join(json.dumps(each, ensure_ascii=False) for each in described))
    if messages and messages[0].role in ("system", "developer"):
        first = messages[0].model_copy(update={"content": joined([messages[0].content, told])})
        return [first, *messages[1:]]
    return [Message(role="system", content=told), *messages]


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
