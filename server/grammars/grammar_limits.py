"""Limits of what describes an answer: of its text, which is read first, and of compiling and trying it."""

from __future__ import annotations

import re

from server.errors import BadRequest

LONGEST_SCHEMA = 64 << 10
"""Characters of a schema as JSON, or of a grammar."""
DEEPEST_SCHEMA = 32
MOST_PROPERTIES = 1000
MOST_REPEATS = 4096
LONGEST_REGEX = 4 << 10
MOST_CHOICES = 1024

COMPILE_SECONDS = 1.5
"""Seconds that a helper process may take to compile and try a grammar, and for which one may wait for it."""
COMPILE_PROCESSOR_SECONDS = 0.5
COMPILE_MEMORY = 512 << 20
"""Bytes of memory that it may take meanwhile."""

REPEATING = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
"""The keywords of JSON Schema that count."""

_REPEAT = re.compile(r"\{\s*+(\d*+)\s*+(?:,\s*+(\d*+)\s*+)?+\}|~\s*+(\d++)(?:\s*+\.\.\s*+(\d++))?")
"""A counted repeat of a regular expression or of EBNF, or one of Lark."""


def too_complex(what: str, param: str) -> BadRequest:
    error = BadRequest(f"{what} Make it simpler.", param)
    error.type = "schema_too_complex"
    return error


def check_schema(schema: object, param: str) -> None:
    """Refuses a schema that is too long, too deep, has too many properties or counts too far."""
    length = properties = 0
    waiting: list[tuple[object, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST_SCHEMA:
            raise too_complex(f"The schema may be nested {DEEPEST_SCHEMA} deep at most.", param)
        if isinstance(value, dict):
            length += 2 + sum(4 + len(name) for name in value)
            if isinstance(named := value.get("properties"), dict):
                properties += len(named)
            _check_counts(value, param)
            nested = [each for each in value.values() if isinstance(each, dict | list | str)]
            waiting.extend((each, depth + 1) for each in nested)
            length += 5 * len(value)
        elif isinstance(value, list):
            length += 2 * len(value)
            waiting.extend((each, depth + 1) for each in value)
        else:
            length += len(value) if isinstance(value, str) else 2
        if properties > MOST_PROPERTIES:
            raise too_complex(f"The schema may have at most {MOST_PROPERTIES} properties.", param)
        if length > LONGEST_SCHEMA:
            raise too_complex(f"The schema may have at most {LONGEST_SCHEMA} characters.", param)


def _check_counts(schema: dict[str, object], param: str) -> None:
    for name in REPEATING:
        count = schema.get(name)
        if isinstance(count, int | float) and count > MOST_REPEATS:
            raise too_complex(f"`{name}` of a schema may be at most {MOST_REPEATS}, got {count}.", param)
    if isinstance(pattern := schema.get("pattern"), str):
        check_regex(pattern, param)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        for pattern in patterns:
            check_regex(str(pattern), param)


def check_regex(regex: str, param: str) -> None:
    if not regex:
        raise BadRequest("A regular expression must not be empty.", param)
    _check_text(regex, "A regular expression", LONGEST_REGEX, param)


def check_grammar(grammar: str, param: str) -> None:
    if not grammar.strip():
        raise BadRequest("A grammar must not be empty.", param)
    _check_text(grammar, "A grammar", LONGEST_SCHEMA, param)


def check_choice(choice: list[str], param: str) -> None:
    if not choice:
        raise BadRequest("`choice` must not be empty: give the texts of which the answer is one.", param)
    if len(choice) > MOST_CHOICES:
        raise too_complex(f"`choice` may have at most {MOST_CHOICES} texts, got {len(choice)}.", param)
    if "" in choice:
        raise BadRequest("`choice` must not have an empty text.", param)
    if sum(map(len, choice)) > LONGEST_SCHEMA:
        raise too_complex(f"`choice` may have at most {LONGEST_SCHEMA} characters together.", param)


def _check_text(text: str, what: str, longest: int, param: str) -> None:
    if len(text) > longest:
        raise too_complex(f"{what} may have at most {longest} characters, got {len(text)}.", param)
    for found in _REPEAT.finditer(text):
        for count in found.groups():
            if count and (len(count) > len(str(MOST_REPEATS)) or int(count) > MOST_REPEATS):
                raise too_complex(f"{what} may repeat a part at most {MOST_REPEATS} times.", param)
