"""The tools that an answer may call, as a question to the process that checks grammars.

The grammar is made there, because the schemas of tools are a stranger's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from server.answers.answer_format import AnswerFormat, format_of_names
from server.answers.answer_grammar import AnswerWriter
from server.answers.formats.call_format import ANY_OBJECT, ToolForm, Unenforceable
from server.errors import BadRequest
from server.grammars.form_grammar import AnswerGrammar, unknown_keywords, validate
from server.grammars.grammar_limits import check_schema
from server.grammars.json_schema import prepare_schema


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
    """The question to the process that checks grammars."""
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
