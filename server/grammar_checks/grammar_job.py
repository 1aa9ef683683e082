"""Compiles clients' grammars first, in a helper process.

It is asked for a form, or for the tools that an answer may call, whose schemas are a stranger's too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from server.errors import BadRequest
from server.grammars.grammar_limits import check_schema, too_complex
from server.grammars.json_schema import prepare_schema
from server.grammars.response_format import (
    AnswerGrammar,
    AskedForm,
    build_grammar,
    unknown_keywords,
    validate,
)
from server.helpers.messages import NO_MEMORY, FollowOrder
from server.output_parsing.answer_format import AnswerFormat, AnswerWriter, format_of_names
from server.output_parsing.formats.call_format import ANY_OBJECT, ToolForm, Unenforceable
from server.output_parsing.parser_plugins import load_parsers


class AskedTool(msgspec.Struct, frozen=True):
    name: str
    schema: dict[str, Any]
    """The schema of its arguments, as the client has sent it."""
    bound: bool
    """Whether its arguments are held to the schema; otherwise to be an object."""
    strict: bool = False
    """Whether the request is refused if not all of the schema can be enforced."""


class AskedCalls(msgspec.Struct, frozen=True, tag=True):
    """An answer that calls tools in the model's own form."""

    dialect: str
    thinking: str
    """The name of the markers of reasoning; empty if the model has none."""
    opener: str
    """What the model writes before calls."""
    tokens: dict[str, int]
    """The special tokens of the markup."""
    tools: list[AskedTool]
    required: bool
    """Whether the answer is calls; otherwise it may be text, too."""
    several: bool
    is_thinking: bool
    """Whether the prompt has opened the reasoning."""
    described: dict[str, Any] | None = None
    """What the checkpoint says itself of its answers, if the names are of that."""
    field: str = "tools"
    """The field of the request to which errors belong."""


def ask_for_calls(
    format: AnswerFormat, tools: list[AskedTool], *, required: bool, several: bool, is_thinking: bool
) -> AskedCalls:
    """The order to check the grammar of such an answer."""
    return AskedCalls(
        dialect=format.dialect.name if format.dialect else "",
        thinking=format.thinking.name if format.thinking else "",
        opener=format.as_written(format.opener),
        tokens={format.written[mark]: id for mark, id in format.tokens.items()},
        tools=tools,
        required=required,
        several=several,
        is_thinking=is_thinking,
        described=None if format.described is None else dict(format.described),
    )


def build_call_grammar(asked: AskedCalls) -> AnswerGrammar:
    """The grammar of the answer. Raises BadRequest for what cannot be enforced, though it has to be."""
    names = asked.dialect, asked.thinking
    format = format_of_names(*names, asked.tokens, asked.opener, asked.described)
    tool = what = ""
    for lenient in (False, True):
        forms = list(_forms(asked, lenient=lenient))
        writer = AnswerWriter(format, forms, several=asked.several, is_thinking=asked.is_thinking)
        try:
            grammar = writer.required() if asked.required else writer.possible()
        except Unenforceable as found:
            tool, what = found.tool, found.keyword
            continue
        except RecursionError:
            raise BadRequest("The schema of a tool is nested too deep.", asked.field) from None
        error, warnings = validate(grammar)
        if not error:
            keywords = {keyword for warning in warnings for keyword in unknown_keywords(warning)}
            return msgspec.structs.replace(grammar, ignored=sorted({*grammar.ignored, *keywords}))
        tool, what = "", ", ".join(unknown_keywords(error)) or error
    raise _refused(asked, tool, what)


def _forms(asked: AskedCalls, *, lenient: bool) -> Iterator[ToolForm]:
    for tool in asked.tools:
        strict = tool.strict or not lenient
        if not tool.bound:
            yield ToolForm(tool.name, ANY_OBJECT)
            continue
        check_schema(tool.schema, asked.field)
        prepared = prepare_schema(tool.schema, asked.field, closed=None, counts=strict)
        yield ToolForm(tool.name, {"type": "object", **prepared}, strict)


def _refused(asked: AskedCalls, tool: str, what: str) -> BadRequest:
    strict = [each.name for each in asked.tools if each.strict]
    if strict:
        named = repr(tool) if tool else "one of " + ", ".join(map(repr, strict))
        return BadRequest(
            f"`strict` is true for the tool {named}, and {what[:200]} of its schema cannot be enforced. "
            "Leave that out, or have the rest enforced without `strict`.",
            asked.field,
        )
    return BadRequest(f"The schema of a tool cannot be used: {what[:300]}", asked.field)


_TOO_SLOW = "The structured output constraint takes too long to follow"
_SIMPLER = "Use fewer alternatives that begin alike, and no rule that repeats itself in many ways."

AskedGrammar = AskedForm | AskedCalls


class GrammarSetup(msgspec.Struct, frozen=True):
    """The settings with which the job is opened."""

    tokens: dict[str, int]
    """The ids of special tokens."""
    parsers: dict[str, str] = {}
    """The operator's files of parsers, by the flags that name them."""


def open_job(data: bytes) -> FollowOrder:
    setup = msgspec.msgpack.decode(data, type=GrammarSetup)
    load_parsers(setup.parsers)
    trial = importlib.import_module("server.grammars.grammar_trial").Trial(setup.tokens)

    def try_grammar(order: bytes, _: bytes) -> AnswerGrammar:
        asked = msgspec.msgpack.decode(order, type=AskedGrammar)
        found = check(asked, setup.tokens)
        if reason := trial.finds(found):
            raise too_complex(f"{_TOO_SLOW}: {reason}. {_SIMPLER}", asked.field)
        return found

    return try_grammar


def check(asked: AskedGrammar, tokens: Mapping[str, int]) -> AnswerGrammar:
    """The grammar of what is asked. Raises BadRequest if it cannot be compiled."""
    try:
        return build_call_grammar(asked) if isinstance(asked, AskedCalls) else build_grammar(asked, tokens)
    except MemoryError:
        raise BadRequest(NO_MEMORY, asked.field) from None
