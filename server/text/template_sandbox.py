"""The Jinja environment of chat templates, set up like the one of transformers, for which they are written.

Jinja's sandbox keeps a template from reaching Python. What makes something huge in one step, and is of no use
to a chat template, is refused here too. That bounds no program: a template that a request brings runs in the
helper process, which the kernel ends when it takes longer than `TemplateLimits` (docs/decisions/0013).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sized
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """The tag `{% generation %}`, which marks a model's answer for training. Here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_NO_ATTRIBUTES = (bytes, bytearray, memoryview, int, float, complex)
_NO_METHODS = frozenset(
    ("encode", "translate", "maketrans", "ljust", "rjust", "center", "zfill", "expandtabs", "format_map")
)
"""Methods of texts that make bytes, or long texts of short ones."""
_TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - _NO_METHODS

MOST_REPEATED = 1 << 20
"""The longest text or list that `*` makes."""
MOST_BITS = 4096
"""The largest number that `*` and `**` make, in bits."""
WIDEST = 10_000
"""The largest number that filters take which fill up to a width or a count."""


class TemplateLimits(msgspec.Struct, frozen=True):
    """The time and memory that one conversation's template may take."""

    seconds: float = 2.0
    memory: int = 256 << 20


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is str:  # nearly always
            return attr in _TEXT_METHODS
        if isinstance(obj, _NO_ATTRIBUTES) or (attr in _NO_METHODS and isinstance(obj, str)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
            raise SecurityError("a number would be too large")
        return super().call_binop(context, operator, left, right)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MOST_BITS:
            raise SecurityError("a number would be too large")
        return
    for whole, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(whole, Sized) and len(whole) * count > MOST_REPEATED:
            raise SecurityError("a repeated text or list would be too long")


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    """The same filter for numbers up to WIDEST."""

    @wraps(filter)
    def bounded(*arguments: Any, **named: Any) -> Any:
        if any(isinstance(one, int) and one > WIDEST for one in (*arguments[1:], *named.values())):
            raise SecurityError(f"a number for the filter is more than {WIDEST}")
        return filter(*arguments, **named)

    return bounded


def make_sandbox() -> Sandbox:
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    sandbox.filters["tojson"] = _tojson
    for name in ("batch", "center", "indent", "slice", "tojson", "wordwrap"):
        sandbox.filters[name] = _bounded(sandbox.filters[name])
    del sandbox.globals["lipsum"]
    sandbox.globals.update(
        raise_exception=_raise_exception, strftime_now=lambda format: datetime.now().strftime(format)
    )
    return sandbox


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
