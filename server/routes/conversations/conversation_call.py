"""A request for the next message of a conversation, whichever API asks: how its answer is read, what it is
held to, and what the client is told is not enforced.

The APIs differ in how they write a conversation and its answer. What is between is the same for all.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request, Response
from pydantic_core import from_json

from engine_core.client.in_flight import AddOptions
from server.access.admission import Admission
from server.errors import BadRequest
from server.frontend.frontend import Delta, Frontend
from server.grammar_checks.grammar_job import AskedTool, ask_for_calls
from server.grammars.form_grammar import AnswerGrammar, AskedForm
from server.options.server_flags import ServerConfig
from server.output_parsing.answer_format import NO_REASONING, AnswerFormat, behind_thinking
from server.output_parsing.answer_reader import AnswerReader
from server.output_parsing.format_detection import find_format
from server.output_parsing.tool_call_dialects import AUTO
from server.output_parsing.unread_text import AnswerPart, CallBegun, Text
from server.reading.prompts import Conversation
from server.reading.system_messages import TOLD_DIALECT
from server.requests.sampling_params import SamplingParams
from server.routes.generation import GenerationCall, admit_answers
from server.routes.request_context import config_of, frontend_of, read_texts, with_warnings
from server.schemas.body import Body
from server.schemas.chat import ChatRequest
from server.text.detokenizer import is_mark

FREE_CALLS = (
    "Under `tool_choice` auto the calls of this model cannot be held to a grammar, "
    "because the tokens that open them also open text"
)
_REQUIRE = "Ask with `tool_choice` required, or without `strict`."
NO_FORM = "tools: no form of calls is known for this model, so that its answers are text"
_ENDS_SOONER = "min_tokens: not enforced where the form of the answer is complete sooner"
_ALIKE = (
    "This model begins calls with a character with which an answer of the form that is asked may begin too, "
    "so that no grammar tells them apart. Ask for one of them: `tool_choice` none for the form, or required."
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
    plan = tell_of_least(await _plan_calls(frontend, config, chat, conversation, owner), chat.min_tokens)
    budget = chat.thinking_budget
    if plan.format is None or plan.format.thinking is None:
        return plan if budget is None else replace(plan, warnings=[*plan.warnings, NO_REASONING])
    if budget is None and not plan.holds_late_calls:
        return plan
    calls = any(map(chat.choice.allows, conversation.tools)) and not plan.holds_late_calls
    is_open = plan.format.begins_thinking(conversation.end)
    bound = plan.format.thinking_within(frontend.tokenizer, budget, is_open=is_open, calls=calls)
    return replace(plan, bounds={**plan.bounds, "thinking": bound})


async def plan_form(
    frontend: Frontend,
    asked: AskedForm,
    plan: AnswerPlan = AnswerPlan(),
    prompt: str = "",
    calls: AnswerGrammar | None = None,
    *,
    owner: str = "",
) -> AnswerPlan:
    """The same plan with the form that was asked for. Raises the error that refuses it.

    Behind a conversation that ends in `prompt`, reasoning comes before what is bound, and if the model may
    call tools, `calls` may take its place.
    """
    built = await frontend.grammars.check(asked, owner)
    ignored = [f"{asked.field}: not enforced: {', '.join(built.ignored)}"] if built.ignored else []
    if plan.format is not None:
        built = _behind(built, plan.format, prompt, calls)
    return replace(plan, bounds={"grammar": built.for_engine()}, warnings=[*plan.warnings, *ignored])


def tell_of_least(plan: AnswerPlan, min_tokens: int | None) -> AnswerPlan:
    """The same plan, with a warning if an answer's form may end it before it has so many tokens."""
    grammar = plan.bounds.get("grammar")
    if not min_tokens or grammar is None or grammar.again:
        return plan
    return replace(plan, warnings=[*plan.warnings, _ENDS_SOONER])


async def _plan_calls(
    frontend: Frontend, config: ServerConfig, chat: ChatRequest, conversation: Conversation, owner: str
) -> AnswerPlan:
    """Plans calls of tools, and the form of the answer beside them."""
    format = find_format(frontend.tokenizer, config.tool_call_parser, config.reasoning_parser)
    choice, prompt, level = chat.choice, conversation.end, config.tool_strict_level
    required = choice.mode == "required"
    form = None if required else chat.asked_form()  # what is required is calls alone
    names = [name for name in conversation.tools if choice.allows(name)]
    if names and format.dialect is None and required and config.tool_call_parser == AUTO:
        format = find_format(frontend.tokenizer, TOLD_DIALECT, config.reasoning_parser)
    if not names or format.dialect is None:
        plan = AnswerPlan(format if format.thinking else None, warnings=[NO_FORM] if names else [])
        return plan if form is None else await plan_form(frontend, form, plan, prompt, owner=owner)
    tools = _asked_tools(conversation, names, every=required or level == "parameter")
    several = chat.parallel_tool_calls is not False and not choice.is_named
    if form is not None:
        alone = replace(format, thinking=None)  # the form of the answer says where reasoning stands
        calls = await frontend.grammars.check(
            ask_for_calls(alone, tools, required=True, several=several, is_thinking=False), owner
        )
        plan = AnswerPlan(format, warnings=_ignored(calls))
        return await plan_form(frontend, form, plan, prompt, calls, owner=owner)
    is_free = choice.mode == "auto" and several and len(names) == len(conversation.tools)
    if is_free and level == "auto" and not any(tool.bound for tool in tools):
        return AnswerPlan(format)
    if choice.mode == "auto" and not format.tells_calls:
        if strict := [tool.name for tool in tools if tool.strict]:
            raise BadRequest(f"`strict` is true for {', '.join(strict)}. {FREE_CALLS}. {_REQUIRE}", "tools")
        return AnswerPlan(format, warnings=[f"tools: {FREE_CALLS}"])
    is_thinking = format.begins_thinking(prompt)
    built = await frontend.grammars.check(
        ask_for_calls(format, tools, required=required, several=several, is_thinking=is_thinking), owner
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
    built: AnswerGrammar, format: AnswerFormat, prompt: str, calls: AnswerGrammar | None
) -> AnswerGrammar:
    """The form behind reasoning, or calls in its place."""
    if format.thinking is None and calls is None:
        return built
    if calls is not None and _begin_alike(built, format.opener):
        raise BadRequest(_ALIKE, "tools")
    return behind_thinking(built, format, calls, is_open=format.begins_thinking(prompt))


def _begin_alike(built: AnswerGrammar, opener: str) -> bool:
    """Whether an answer may begin with the one character that opens calls. The lexer does not go back."""
    if len(opener) != 1 or is_mark(opener):
        return False
    return opener == "{" or built.kind != "json" or json.loads(built.text).get("type") != "object"


_MISTRAL_LENGTH = 9


class ConversationCall(GenerationCall):
    """A request for the next message of a conversation."""

    def __init__(
        self,
        request: Request,
        chat: ChatRequest,
        sampling: SamplingParams,
        conversation: Conversation,
        plan: AnswerPlan,
        prefix: str,
        admission: Admission,
        *,
        counts_output: bool,
    ) -> None:
        """`chat` is what is asked, in the words of chat completions."""
        super().__init__(
            *(request, chat, sampling, [conversation.prompt], prefix, admission),
            counts_output=counts_output,
            bounds=[plan.bounds],
        )
        self.chat, self.conversation, self.format, self._plan = chat, conversation, plan.format, plan
        if self.format and self.format.thinking:
            self.reasoning = {}

    @property
    def dialect(self) -> str:
        """The name of the form in which the model writes calls; empty if none is read."""
        return self.format.dialect.name if self.format and self.format.dialect else ""

    def new_reader(self) -> AnswerReader | None:
        """The reader of one choice, if answers are read."""
        if (format := self.format) is None:
            return None
        return AnswerReader(
            format.dialect,
            format.thinking,
            tools=self._callable_tools() or None,
            is_thinking=format.begins_thinking(self.conversation.end),
            written=format.written,
            calls_end_thinking=not self._plan.holds_late_calls,
        )

    def finish_reason(self, finish: str, *, has_calls: bool) -> str:
        """The reason in OpenAI's words: a function that the request has named is no reason of its own."""
        named = self.chat.tool_choice is not None and self.chat.choice.is_named
        return "tool_calls" if has_calls and finish == "stop" and not named else finish

    def _callable_tools(self) -> dict[str, dict[str, object]]:
        tools, chat = self.conversation.tools, self.chat
        if not tools or chat.tool_choice is None:
            return tools
        choice = chat.choice
        return {name: schema for name, schema in tools.items() if choice.allows(name)}

    def warn(self, response: Response) -> Response:
        """The answer, with headers that say what of the request has no effect."""
        return with_warnings(response, (*self.conversation.warnings, *self._plan.warnings))


class PartReader:
    """Reads one choice of an answer as parts: reasoning, texts and calls."""

    def __init__(self, call: ConversationCall) -> None:
        self._reader = call.new_reader()
        self.has_calls = False

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of reasoning so far."""
        return 0 if self._reader is None else self._reader.reasoning_tokens

    def read(self, delta: Delta) -> list[AnswerPart]:
        """The parts that a delta begins, continues or completes."""
        reader = self._reader
        if reader is None:
            return [Text(delta.text)] if delta.text else []
        parts = reader.push(delta.text, delta.widths)
        if delta.finish_reason is not None:
            parts += reader.finish()
        self.has_calls = self.has_calls or any(isinstance(part, CallBegun) for part in parts)
        return parts


async def begin_conversation(
    request: Request,
    body: Body,
    chat: ChatRequest,
    prefix: str,
    *,
    counts_output: bool = True,
    window: int | None = None,
) -> ConversationCall:
    """Reads a conversation and makes its request to the engine, or raises the error that refuses it.

    `chat` says in the words of chat completions what `body` asks for, and `prefix` begins the answer's id.
    `window` is the most tokens of prompt and answer, if that is not the model's own.
    """
    frontend = frontend_of(request)
    frontend.check_model(chat.model)
    conversation: Conversation = await read_texts(request, body)
    sampling = chat.to_sampling()
    if window is not None:
        sampling.max_tokens = _room(conversation.prompt.length, window, sampling.max_tokens)
    admission = admit_answers(request, 1, sampling.n)
    owner = admission.caller.owner
    plan = await plan_answer(frontend, config_of(request), chat, conversation, owner)
    if plan.format is not None:
        sampling.shown_as = dict(plan.format.marks)
    elif sampling.logprobs is not None:
        sampling.shown_as = {}  # who writes logprobs has to know the characters of each token
    return ConversationCall(
        request, chat, sampling, conversation, plan, prefix, admission, counts_output=counts_output
    )


def _room(prompt: int, window: int, most: int | None) -> int:
    """The tokens of an answer that a window leaves room for, and `most` if that is less."""
    if prompt >= window:
        raise BadRequest(f"The prompt has {prompt} tokens, and a window of {window} has no room for it.")
    return window - prompt if most is None else min(most, window - prompt)


def object_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call; if they were cut, what is there of them, as clients read a stream."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def new_call_id(dialect: str) -> Callable[[], str]:
    """A function that makes ids of calls in the form that a dialect's templates want."""
    if dialect == "mistral":
        return lambda: "".join(
            secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_LENGTH)
        )
    return lambda: "call_" + secrets.token_hex(12)
