"""Decides which tools an answer may call, what its calls are held to, and what the client is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine_core.client.in_flight import AddOptions
from server.answers.answer_format import NO_REASONING, AnswerFormat
from server.answers.dialects import AUTO
from server.answers.format_detection import find_format
from server.api.chat import ChatRequest
from server.errors import BadRequest
from server.frontend.frontend import Frontend
from server.grammar_checks.tool_calls import AskedTool, ask_for_calls
from server.grammars.form_grammar import AnswerGrammar
from server.grammars.structured_params import AskedForm
from server.options.server_config import ServerConfig, ToolStrictLevel
from server.reading.prompts import TOLD_DIALECT, Conversation
from server.routes.answer_bounds import form_of

FREE_CALLS = (
    "Under `tool_choice` auto the calls of this model cannot be held to a grammar, "
    "because the tokens that open them also open text"
)
_REQUIRE = "Ask with `tool_choice` required, or without `strict`."
NO_FORM = "tools: no form of calls is known for this model, so that its answers are text"


@dataclass(frozen=True, slots=True)
class Calling:
    """How the answers of one request are read, and what they are held to."""

    format: AnswerFormat | None = None
    """None where an answer is text and nothing else."""
    bounds: AddOptions = field(default_factory=AddOptions)
    """What the engine is told to hold the answer to."""
    warnings: Sequence[str] = ()
    sleeps: bool = False
    """Whether calls are held to a grammar that sleeps before them, and while the model thinks."""


async def plan_calls(
    frontend: Frontend, config: ServerConfig, chat: ChatRequest, conversation: Conversation
) -> Calling:
    """Raises the error that refuses the request, if a schema cannot be enforced and has to be."""
    calling = await _plan_calls(frontend, config, chat, conversation)
    budget = chat.thinking_budget
    if calling.format is None or calling.format.thinking is None:
        return calling if budget is None else replace(calling, warnings=[*calling.warnings, NO_REASONING])
    if budget is None and not calling.sleeps:
        return calling
    calls = any(map(chat.choice.allows, conversation.tools)) and not calling.sleeps
    is_open = calling.format.begins_thinking(conversation.end)
    bound = calling.format.thinking_within(frontend.tokenizer, budget, is_open=is_open, calls=calls)
    return replace(calling, bounds={**calling.bounds, "thinking": bound})


async def _plan_calls(
    frontend: Frontend, config: ServerConfig, chat: ChatRequest, conversation: Conversation
) -> Calling:
    format = find_format(frontend.tokenizer, config.tool_call_parser, config.reasoning_parser)
    choice = chat.choice
    form = None if choice.mode == "required" else chat.asked_form()  # what is required is calls alone
    names = [name for name in conversation.tools if choice.allows(name)]
    if names and format.dialect is None and choice.mode == "required" and config.tool_call_parser == AUTO:
        format = find_format(frontend.tokenizer, TOLD_DIALECT, config.reasoning_parser)
    if not names or format.dialect is None:
        calling = Calling(format if format.thinking else None, warnings=[NO_FORM] if names else [])
        return calling if form is None else await _hold_to_form(frontend, form, conversation, calling)
    asked = _asked_tools(chat, conversation, names, config.tool_strict_level)
    several = chat.parallel_tool_calls is not False and not choice.is_named
    if form is not None:
        alone = replace(format, thinking=None)  # the form of the answer says where reasoning stands
        ask = ask_for_calls(alone, asked, required=True, several=several, is_thinking=False)
        calls = await frontend.grammars.check(ask)
        return await _hold_to_form(
            frontend, form, conversation, Calling(format, warnings=_said(calls)), calls
        )
    is_free = choice.mode == "auto" and several and len(names) == len(conversation.tools)
    if is_free and config.tool_strict_level == "auto" and not any(tool.bound for tool in asked):
        return Calling(format)
    if choice.mode == "auto" and not format.tells_calls:
        if strict := [tool.name for tool in asked if tool.strict]:
            raise BadRequest(f"`strict` is true for {', '.join(strict)}. {FREE_CALLS}. {_REQUIRE}", "tools")
        return Calling(format, warnings=[f"tools: {FREE_CALLS}"])
    is_thinking = format.begins_thinking(conversation.end)
    required = choice.mode == "required"
    built = await frontend.grammars.check(
        ask_for_calls(format, asked, required=required, several=several, is_thinking=is_thinking)
    )
    return Calling(format, {"grammar": built.for_engine()}, _said(built), bool(built.wakes))


def _said(built: AnswerGrammar) -> list[str]:
    return [f"not enforced of the schemas of tools: {', '.join(built.ignored)}"] if built.ignored else []


async def _hold_to_form(
    frontend: Frontend,
    asked: AskedForm,
    conversation: Conversation,
    calling: Calling,
    calls: AnswerGrammar | None = None,
) -> Calling:
    """The same with the form that is asked of the answer, which `calls` may take the place of."""
    form = await form_of(frontend, asked, calling.format, conversation.end, calls=calls)
    return replace(calling, bounds=form.bounds, warnings=[*calling.warnings, *form.warnings])


def _asked_tools(
    chat: ChatRequest, conversation: Conversation, names: Sequence[str], level: ToolStrictLevel
) -> list[AskedTool]:
    every = chat.choice.mode == "required" or level == "parameter"
    return [
        AskedTool(
            name,
            conversation.tools[name],
            bound=every or name in conversation.strict_tools or name in conversation.custom_tools,
            strict=name in conversation.strict_tools,
        )
        for name in names
    ]
