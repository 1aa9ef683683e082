"""Plans answers: how they are read, what they are held to, and what the client is told is not enforced;
and reads each choice of a conversation by its plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import msgspec

from engine_core.client.in_flight import AddOptions
from server.errors import BadRequest
from server.frontend.frontend import Frontend
from server.frontend.text_output import Delta
from server.grammar_checks.grammar_job import AskedTool, ask_for_calls
from server.grammars.response_format import AnswerGrammar, AskedForm
from server.options.server_flags import ServerConfig
from server.output_parsing.answer_format import NO_REASONING, AnswerFormat, behind_thinking
from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.format_detection import find_format
from server.output_parsing.tool_call_dialects import AUTO
from server.reading.prompts import Conversation, Prompt
from server.reading.system_messages import TOLD_DIALECT
from server.requests.sampling_params import SamplingParams
from server.schemas.chat import ChatRequest
from server.text.detokenizer import is_mark
from server.text.tokenizer import Tokenizer
from worker.protocol import TokenLogprobs

_log = logging.getLogger(__name__)
FREE_CALLS = (
    "Under `tool_choice` auto the calls of this model cannot be held to a grammar, "
    "because the tokens that open them also open text"
)
TOLD = (
    "tools: the chat template of this model has no form of calls, so that they are described to it in text, "
    "and calls are read as JSON between <tool_call> and </tool_call>"
)
_told: WeakSet[Tokenizer] = WeakSet()
"""The tokenizers of models for which the log says that tools are described in text."""
_REQUIRE = "Ask with `tool_choice` required, or without `strict`."
NO_FORM = "tools: it is not known how this model writes tool calls, so its answers are text"
_ENDS_SOONER = "min_tokens: not enforced where the structured output is complete sooner"
_FORM_FIRST = "thinking_token_budget: no effect, because the structured output begins with the first token"
_ALIKE = (
    "This model begins tool calls with a character with which the structured output may begin too, so that "
    "no grammar tells them apart. Ask for one of them, by `tool_choice` none or required."
)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The format by which the answers of one request are read, and the grammar that holds them."""

    format: AnswerFormat | None = None
    """None where an answer is text and nothing else."""
    bounds: AddOptions = field(default_factory=AddOptions)
    """What the engine is told to hold the answer to."""
    warnings: Sequence[str] = ()
    holds_late_calls: bool = False
    """Whether calls are held to a grammar that sleeps before them, and while the model thinks."""


async def plan_answer(
    frontend: Frontend, config: ServerConfig, chat: ChatRequest, conversation: Conversation, owner: str
) -> AnswerPlan:
    """Raises the error that refuses the request, if a schema cannot be enforced and has to be."""
    format, warnings = _find_format(frontend, config, chat, conversation)
    plan = await _plan_calls(frontend, format, chat, conversation, owner)
    if warnings:
        plan = replace(plan, warnings=[*warnings, *plan.warnings])
    plan = tell_of_least(plan, chat.min_tokens)
    budget = chat.thinking_budget
    if plan.format is None or plan.format.thinking is None:
        return plan if budget is None else replace(plan, warnings=[*plan.warnings, NO_REASONING])
    if budget is None and not plan.holds_late_calls:
        return plan
    calls = any(map(chat.choice.allows, conversation.tools)) and not plan.holds_late_calls
    is_open = plan.format.begins_thinking(conversation.end)
    bound = plan.format.thinking_within(frontend.tokenizer, budget, is_open=is_open, calls=calls)
    return replace(plan, bounds={**plan.bounds, "thinking": bound})


async def plan_completions(
    frontend: Frontend,
    form: AskedForm | None,
    budget: int | None,
    sampling: SamplingParams,
    prompts: Sequence[Prompt],
    owner: str,
) -> tuple[AnswerPlan, list[AddOptions]]:
    """Plans answers that are text and nothing else; also returns what those to each prompt are held to.
    Raises the error that refuses the request, if its form cannot be enforced."""
    config, tokenizer = frontend.config, frontend.tokenizer
    plan = AnswerPlan() if form is None else await plan_form(frontend, form, owner=owner)
    plan = tell_of_least(plan, sampling.min_tokens)
    bounds = [plan.bounds for _ in prompts]
    if budget is None:
        return plan, bounds
    format = find_format(tokenizer, config.tool_call_parser, config.reasoning_parser)
    if format.thinking is None:
        return replace(plan, warnings=[*plan.warnings, NO_REASONING]), bounds
    if form is not None:
        return replace(plan, warnings=[*plan.warnings, _FORM_FIRST]), bounds
    for number, prompt in enumerate(prompts):
        text = tokenizer.decode(prompt.tokens, False) if prompt.text is None else prompt.text
        is_open = format.leaves_thinking_open(text)
        bounds[number] = {"thinking": format.thinking_within(tokenizer, budget, is_open=is_open)}
    return plan, bounds


async def plan_form(
    frontend: Frontend,
    asked: AskedForm,
    plan: AnswerPlan = AnswerPlan(),
    prompt: str = "",
    calls: AnswerGrammar | None = None,
    *,
    owner: str = "",
    may_think: bool = True,
) -> AnswerPlan:
    """The same plan with the form that was asked for. Raises the error that refuses it.

    Behind a conversation that ends in `prompt`, reasoning comes before what is bound, and if the model may
    call tools, `calls` may take its place.
    """
    built = await frontend.grammars.check(asked, owner)
    ignored = [f"{asked.field}: not enforced: {', '.join(built.ignored)}"] if built.ignored else []
    if plan.format is not None:
        built = _behind(built, plan.format, prompt, calls, may_think=may_think)
    return replace(plan, bounds={"grammar": built.for_engine()}, warnings=[*plan.warnings, *ignored])


def tell_of_least(plan: AnswerPlan, min_tokens: int | None) -> AnswerPlan:
    """The same plan, with a warning if an answer's form may end it before it has so many tokens."""
    grammar = plan.bounds.get("grammar")
    if not min_tokens or grammar is None or grammar.again:
        return plan
    return replace(plan, warnings=[*plan.warnings, _ENDS_SOONER])


def _find_format(
    frontend: Frontend, config: ServerConfig, chat: ChatRequest, conversation: Conversation
) -> tuple[AnswerFormat, list[str]]:
    """The format of the answers to a conversation, and what the client is told of it."""
    tokenizer, parser, warnings = frontend.tokenizer, config.tool_call_parser, list[str]()
    format = find_format(tokenizer, parser, config.reasoning_parser)
    if format.dialect is None and conversation.tools and any(map(chat.choice.allows, conversation.tools)):
        is_told = parser == AUTO and chat.may_be_told
        warnings = [TOLD if is_told else NO_FORM]
        if is_told:
            format = find_format(tokenizer, TOLD_DIALECT, config.reasoning_parser)
            if tokenizer not in _told:
                _told.add(tokenizer)
                _log.warning("%s: %s (docs/tools.md)", config.model_names[0], TOLD)
    return format if chat.separate_reasoning else replace(format, thinking=None), warnings


async def _plan_calls(
    frontend: Frontend, format: AnswerFormat, chat: ChatRequest, conversation: Conversation, owner: str
) -> AnswerPlan:
    """Plans calls of tools, and the form of the answer beside them."""
    choice, prompt, level = chat.choice, conversation.end, frontend.config.tool_strict_level
    required = choice.mode == "required"
    form = None if required else chat.asked_form()  # what is required is calls alone
    names = [name for name in conversation.tools if choice.allows(name)]
    if not names or format.dialect is None:
        plan = AnswerPlan(format if format.thinking else None)
        if form is None:
            return plan
        return await plan_form(frontend, form, plan, prompt, owner=owner, may_think=chat.may_think)
    tools = _asked_tools(conversation, names, every=required or level == "parameter")
    several = chat.several_calls
    if form is not None:
        alone = replace(format, thinking=None)  # the form of the answer says where reasoning stands
        calls = await frontend.grammars.check(
            ask_for_calls(alone, tools, required=True, several=several, is_thinking=False), owner
        )
        plan = AnswerPlan(format, warnings=_ignored(calls))
        return await plan_form(frontend, form, plan, prompt, calls, owner=owner, may_think=chat.may_think)
    is_free = choice.mode == "auto" and several and len(names) == len(conversation.tools)
    if is_free and level == "auto" and not any(tool.bound for tool in tools):
        return AnswerPlan(format)
    if choice.mode == "auto" and not format.tells_calls:
        if strict := [tool.name for tool in tools if tool.strict]:
            raise BadRequest(f"`strict` is true for {', '.join(strict)}. {FREE_CALLS}. {_REQUIRE}", "tools")
        return AnswerPlan(format, warnings=[f"tools: {FREE_CALLS}"])
    is_thinking = format.begins_thinking(prompt)
    bound = format if is_thinking or chat.may_think or not required else replace(format, thinking=None)
    built = await frontend.grammars.check(
        ask_for_calls(bound, tools, required=required, several=several, is_thinking=is_thinking), owner
    )
    return AnswerPlan(format, {"grammar": built.for_engine()}, _ignored(built), bool(built.wakes))


def _asked_tools(conversation: Conversation, names: Sequence[str], *, every: bool) -> list[AskedTool]:
    """The tools of these names; `every` holds the calls of each to its schema."""
    strict, custom = conversation.strict_tools, conversation.custom_tools
    return [
        AskedTool(
            name,
            conversation.tools[name],
            bound=every or name in strict or name in custom,
            strict=name in strict,
        )
        for name in names
    ]


def _ignored(built: AnswerGrammar) -> list[str]:
    return [f"not enforced of the schemas of tools: {', '.join(built.ignored)}"] if built.ignored else []


def _behind(
    built: AnswerGrammar, format: AnswerFormat, prompt: str, calls: AnswerGrammar | None, *, may_think: bool
) -> AnswerGrammar:
    """The form behind reasoning, or calls in its place."""
    if format.thinking is None and calls is None:
        return built
    if calls is not None and _begin_alike(built, format.opener):
        raise BadRequest(_ALIKE, "tools")
    is_open = format.begins_thinking(prompt)
    return behind_thinking(built, format, calls, is_open=is_open, may_open=may_think)


def _begin_alike(built: AnswerGrammar, opener: str) -> bool:
    """Whether an answer may begin with the one character that opens calls. The lexer does not go back."""
    if len(opener) != 1 or is_mark(opener):
        return False
    return opener == "{" or built.kind != "json" or json.loads(built.text).get("type") != "object"


class ChoiceReader:
    """What reads one choice of a conversation's answer as parts: reasoning, texts and calls."""

    def __init__(self, conversation: Conversation, chat: ChatRequest, plan: AnswerPlan) -> None:
        self.has_calls = False
        """Whether a call is complete."""
        self.reader: AnswerReader | None = None
        """None if the answer is text and nothing else."""
        format, tools = plan.format, conversation.tools
        self.counts_reasoning = bool(format and format.thinking)
        if format is None:
            return
        if tools and chat.tool_choice is not None:
            choice = chat.choice
            tools = {name: schema for name, schema in tools.items() if choice.allows(name)}
        self.reader = AnswerReader(
            format.dialect,
            format.thinking,
            tools=tools or None,
            is_thinking=format.begins_thinking(conversation.end),
            written=format.written,
            calls_end_thinking=not plan.holds_late_calls,
            holds_calls=False,
        )


class TokenByToken:
    """Cuts the deltas of a choice into tokens, so that how many came in a step makes no difference."""

    def __init__(self) -> None:
        self._unshown: list[tuple[int, TokenLogprobs, int]] = []
        """Tokens, with their logprobs and widths, whose text may become a stop string, or is no whole
        character yet."""

    def pieces(self, delta: Delta) -> Iterator[tuple[Delta, list[int]]]:
        """The pieces, each with its tokens, and the widths that the reader of the choice gets with it."""
        # The token that ends an answer has no width: it is no part of the text.
        self._unshown += zip(delta.token_ids, delta.logprobs, delta.widths, strict=False)
        text, widths, taken = delta.text, delta.widths, 0
        piece = Delta(delta.index, token_ids=[], logprobs=[], widths=[])
        while text and taken < len(self._unshown):
            id, entry, width = self._unshown[taken]
            taken += 1
            piece.token_ids.append(id)
            piece.logprobs.append(entry)
            piece.widths.append(width)
            piece.text, text = text[:width], text[width:]
            if piece.text:
                yield piece, widths
                piece, widths = Delta(delta.index, token_ids=[], logprobs=[], widths=[]), []
        del self._unshown[:taken]
        own = {"token_ids": piece.token_ids, "logprobs": piece.logprobs, "widths": piece.widths}
        yield msgspec.structs.replace(delta, text=text, **own), widths
