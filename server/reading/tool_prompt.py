"""Tools in the prompt of a model that knows no form of calls: it is told one, because a call is required."""

from __future__ import annotations

import json
from typing import Any

from server.api.messages import Message, Tool

TOLD_DIALECT = "hermes"
"""The form of calls that the model is told."""

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
        first = messages[0].model_copy(update={"content": f"{messages[0].text()}\n\n{told}"})
        return [first, *messages[1:]]
    return [Message(role="system", content=told), *messages]
