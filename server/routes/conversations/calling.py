"""Which tools an answer may call, what binds its calls, and what the client is told of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_core.client.add_options import AddOptions
from engine_core.protocol import Grammar
from server.answers.dialects import AUTO
from server.answers.finding import AnswerFormat, format_of
from server.answers.writing.asked import AskedTool, ask_for_calls
from server.api.chat import ChatRequest
from server.frontend import Frontend
from server.options.table import ServerConfig, ToolStrictLevel
from server.reading.prompts import Conversation
from server.reading.tool_prompt import TOLD_DIALECT

NO_FORM = "tools: no form of calls is known for this model, so that its answers are text"


@dataclass(frozen=True, slots=True)
class Calling:
    """How the answers of one request are read, and what they are held to."""

    format: AnswerFormat | None = None
    """None where an answer is text and nothing else."""
    bounds: AddOptions = field(default_factory=AddOptions)
    """What the engine is told to hold the answer to."""
    warnings: Sequence[str] = ()


async def plan_calls(
    frontend: Frontend, config: ServerConfig, chat: ChatRequest, conversation: Conversation
) -> Calling:
    """Raises the error that refuses the request, if a schema cannot be enforced and has to be."""
    format = format_of(frontend.tokenizer, config.tool_call_parser, config.reasoning_parser)
    choice = chat.choice
    names = [name for name in conversation.tools if choice.allows(name)]
    if not names:
        return Calling(format if format.thinking else None)
    if format.dialect is None:
        if choice.mode != "required" or config.tool_call_parser != AUTO:
            return Calling(format if format.thinking else None, warnings=[NO_FORM])
        format = format_of(frontend.tokenizer, TOLD_DIALECT, config.reasoning_parser)
    asked = _asked_tools(chat, conversation, names, config.tool_strict_level)
    several = chat.parallel_tool_calls is not False and not choice.is_named
    limited = len(names) < len(conversation.tools) or not several
    if choice.mode == "auto" and not limited and not any(tool.bound for tool in asked):
        if config.tool_strict_level == "auto":
            return Calling(format)
    built = await frontend.prove(
        ask_for_calls(
            format,
            asked,
            required=choice.mode == "required",
            several=several,
            is_thinking=format.begins_thinking(conversation.end),
        )
    )
    grammar = Grammar(built.kind, built.text, built.wakes, built.again)
    warnings = [f"not enforced of the schemas of tools: {', '.join(built.ignored)}"] if built.ignored else []
    return Calling(format, {"grammar": grammar}, warnings)


def _asked_tools(
    chat: ChatRequest, conversation: Conversation, names: Sequence[str], level: ToolStrictLevel
) -> list[AskedTool]:
    every = chat.choice.mode == "required" or level == "parameter"
    return [
        AskedTool(
            name,
            conversation.tools[name],
            bound=every or name in conversation.strict_tools,
            strict=name in conversation.strict_tools,
        )
        for name in names
    ]
