"""Reads the forms that clients ask of answers, and makes one grammar of each.

Grammars are made in the process that checks them (`server/grammar_checks/grammar_job.py`), because all of
this is text of strangers; programs that are their own client make them in their own process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import msgspec

from engine_core.protocol import Grammar
from server.errors import BadRequest
from server.grammars import lark
from server.grammars.grammar_limits import check_choice, check_grammar, check_regex, check_schema
from server.grammars.json_schema import Schema, escapes_for, prepare_schema
from server.grammars.structural_tags import TagGrammar

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The fields of which one says what an answer shall be; the others say how."""


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, repr_omit_defaults=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The form that an answer shall have: exactly one of the first six. Names and meanings are vLLM's."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema."""
    regex: str | None = None
    """A regular expression, which the whole answer matches."""
    choice: list[str] | None = None
    """The texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in EBNF as llama.cpp writes it, with `::=`, or in llguidance's form of Lark."""
    json_object: bool | None = None
    """Whether the answer is any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Text of which parts between tags have forms of their own, as xgrammar describes it in JSON."""
    disable_any_whitespace: bool = False
    """Whether JSON is written without whitespace between its tokens."""
    disable_additional_properties: bool | None = None
    """Whether objects have only the properties that their schema names. None: those that name some have."""
    whitespace_pattern: str | None = None
    """A regular expression of the whitespace that may stand between tokens of JSON."""

    def asked(self) -> list[str]:
        """The names of the constraints that are asked for."""
        # `json: false` is a schema, which nothing satisfies; `json_object: false` asks for nothing.
        return [
            name
            for name in CONSTRAINTS
            if (value := getattr(self, name)) is not None and (name != "json_object" or value)
        ]


class AskedForm(msgspec.Struct, frozen=True, tag=True):
    """The form that was asked for, and by which field of the request."""

    params: StructuredOutputsParams
    field: str
    strict: bool = False
    """Whether a request is refused of which not all can be enforced."""

    def constraint(self) -> str:
        """The name of the one constraint. Raises BadRequest if there is none, or more than one."""
        names = self.params.asked()
        if len(names) > 1:
            raise BadRequest(
                "You can only use one kind of structured outputs constraint but multiple are specified: "
                f"{', '.join(names)}.",
                self.field,
            )
        if not names:
            raise BadRequest(
                "You must use one kind of structured outputs constraint but none are specified: give one of "
                f"{', '.join(CONSTRAINTS)}.",
                self.field,
            )
        return names[0]


_NAMED = re.compile(r'"([^"]+)"')
_LONGEST_REASON = 300
_CRASHED = "its compiler crashes at it, as at values of a wrong type that are long and not ASCII"


class AnswerGrammar(msgspec.Struct, frozen=True, tag=True):
    """A grammar, as `engine_core.protocol.Grammar` has it, and what of the request it leaves out."""

    kind: Literal["json", "regex", "lark", "llguidance"]
    text: str
    ignored: list[str] = []
    """What was asked and is not enforced, as keywords of JSON Schema."""
    wakes: tuple[tuple[int, ...], ...] = ()
    again: bool = False

    def for_engine(self) -> Grammar:
        return Grammar(self.kind, self.text, self.wakes, self.again)


def build_grammar(asked: AskedForm, tokens: Mapping[str, int]) -> AnswerGrammar:
    """The grammar of what was asked; `tokens` are the ids of special tokens. Raises BadRequest."""
    keywords: list[str] = []
    try:
        grammar = _grammar(asked, tokens, lenient=False)
        error, warnings = validate(grammar)
        if error and not asked.strict and (keywords := unknown_keywords(error)):
            grammar = _grammar(asked, tokens, lenient=True)
            error, warnings = validate(grammar)
    except RecursionError:
        raise BadRequest("The structured output constraint is nested too deep.", asked.field) from None
    if error:
        raise _refused(asked, error)
    if keywords:
        keywords += [keyword for warning in warnings for keyword in unknown_keywords(warning)]
    return msgspec.structs.replace(grammar, ignored=sorted({*keywords}))


def _grammar(asked: AskedForm, tokens: Mapping[str, int], *, lenient: bool) -> AnswerGrammar:
    params, field = asked.params, asked.field
    match asked.constraint():
        case "json":
            return AnswerGrammar(
                "json", json.dumps(_schema(params.json, asked, lenient=lenient), ensure_ascii=False)
            )
        case "json_object":
            anything = _schema({"type": "object"}, asked, lenient=lenient)
            return AnswerGrammar("json", json.dumps(anything))
        case "regex":
            pattern = str(params.regex)
            check_regex(pattern, field)
            return AnswerGrammar("regex", pattern)
        case "choice":
            choice = params.choice or []
            check_choice(choice, field)
            return AnswerGrammar("lark", lark.from_choice(choice))
        case "grammar":
            text = str(params.grammar)
            check_grammar(text, field)
            return AnswerGrammar("lark", lark.from_grammar(text, field))
        case _:
            tag = _object(params.structural_tag, "structural_tag", field)
            check_schema(tag, field)
            prepare = partial(_schema, asked=asked, lenient=lenient)
            return AnswerGrammar("llguidance", TagGrammar(tokens, prepare, field).build(tag))


def _schema(given: object, asked: AskedForm, *, lenient: bool) -> Schema:
    """The schema to compile, with llguidance's options in it."""
    params, field = asked.params, asked.field
    schema = {} if given is True else _object(given, "a JSON schema", field)
    check_schema(schema, field)
    closed = params.disable_additional_properties
    prepared = prepare_schema(schema, field, closed=closed, counts=not lenient)
    options: dict[str, Any] = {"whitespace_pattern": lark.WHITESPACE, "lenient": lenient}
    if params.disable_any_whitespace or params.whitespace_pattern == "":
        options = {"whitespace_flexible": False, "lenient": lenient}
    elif params.whitespace_pattern is not None:
        check_regex(params.whitespace_pattern, field)
        options["whitespace_pattern"] = params.whitespace_pattern
    return {**prepared, "x-guidance": {**options, **escapes_for(prepared)}}


def _object(given: object, what: str, field: str) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise BadRequest(f"{what} is given as a text, which is not JSON: {error}", field) from None
    if not isinstance(given, dict):
        raise BadRequest(f"{what} must be an object, got {type(given).__name__}.", field)
    return given


def validate(grammar: AnswerGrammar) -> tuple[str, list[str]]:
    """What llguidance says of a grammar, without a vocabulary: an error or an empty text, and warnings."""
    # With the first grammar and not before: the library takes a tenth of a second.
    from llguidance import LLMatcher

    from engine_core.grammar.llguidance_matcher import LIMITS, llguidance_grammar

    text = llguidance_grammar(grammar.kind, grammar.text)
    try:
        failed, found = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which cannot be imported, and is no Exception
            raise
        return _CRASHED, []
    return (found[0] or "it allows no text", []) if failed else ("", found)


def unknown_keywords(message: str) -> list[str]:
    """The keywords of JSON Schema that a message names as unknown to llguidance; none if that is not it."""
    if "Unimplemented keys: " in message:
        return _NAMED.findall(message.partition("Unimplemented keys: ")[2].partition("]")[0])
    if "Unknown format: " in message:
        named = message.partition("Unknown format: ")[2].split()[:1]  # none, if its name is empty
        return [" ".join(["format", *named])]
    if "oneOf" in message:
        return ["oneOf"]
    if "min/maxProperties" in message:
        return ["minProperties or maxProperties"]
    return []


def _refused(asked: AskedForm, error: str) -> BadRequest:
    keywords = unknown_keywords(error)
    if keywords and asked.strict:
        named = ", ".join(f"`{keyword}`" for keyword in keywords)
        return BadRequest(
            f"`strict` is true, and {named} of the schema cannot be enforced. Leave that out, or have the "
            "rest enforced without `strict`.",
            asked.field,
        )
    what = "The JSON schema" if asked.constraint() == "json" else f"`{asked.constraint()}`"
    return BadRequest(f"{what} cannot be used: {_in_a_line(error)}", asked.field)


def _in_a_line(error: str) -> str:
    """An error of llguidance without the grammar that it repeats."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    text = told or (lines[0] if lines else error)
    return "".join(char if char.isprintable() else " " for char in text)[:_LONGEST_REASON]
