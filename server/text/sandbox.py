"""A Jinja environment for chat templates that cannot run away.

Templates come with checkpoints, and with requests where the operator allows it. Jinja's sandbox keeps them
from reaching Python; this one also bounds their time (a tick in every loop and macro body) and the size of
every text and list they can build. Set up like the one of transformers, for which templates are written.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Sized
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0
MAX_SIZE = 8 << 20
"""Characters of any text, and elements of any list, that a template may build."""
MAX_BITS = 4096
MAX_INDENT = 16

_deadline: ContextVar[float] = ContextVar("deadline")
_WIDE = re.compile(r"\d{4}|\*|\{[^{}]*\{")
"""In a format string: a width in the thousands, or one that is itself an argument."""
_PADDING_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs"}
_PADDING_FILTERS = ("center", "format", "wordwrap", "urlize", "xmlattr")


class Bounded(TemplateError):
    """The template passed one of the bounds above."""


class _Generation(Extension):
    """`{% generation %}` marks what a model said, for training. Here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounds(NodeTransformer):
    """Puts a tick first in every loop and macro body, and has `a ~ b` checked for its size."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join_text", node.nodes, node.lineno)

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno))
        return node


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method, lineno=line), arguments, [], None, None, lineno=line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.concat = _bounded_concat
        self.filters.update(tojson=_tojson, indent=_indent, join=_join, replace=_replace)
        for name in _PADDING_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def compile_bounded(self, source: str) -> Callable[[dict[str, object]], str]:
        tree = _Bounds().visit(self.parse(source))
        template = self.from_string(tree)

        def render(variables: dict[str, object]) -> str:
            token = _deadline.set(time.monotonic() + MAX_SECONDS)
            try:
                return template.render(variables)
            finally:
                _deadline.reset(token)

        return render

    @staticmethod
    def tick() -> None:
        if time.monotonic() > _deadline.get():
            raise Bounded(f"The chat template ran for more than {MAX_SECONDS:g} seconds.")

    @staticmethod
    def join_text(*parts: object) -> str:
        return _bounded_concat(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Asked of every attribute before all else; only `str.format` and `format_map` are wrapped."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE.search(value.__self__):
            raise SecurityError("the chat template formats with a very large width")
        return wrapped

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str) and obj.__name__ == "replace" and len(args) >= 2:
            return _replace(text, *args, **kwargs)
        if isinstance(text, str) and obj.__name__ == "join" and len(args) == 1:
            return _join(args[0], text)
        return super().call(context, obj, *args, **kwargs)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise Bounded(f"The chat template built more than {MAX_SIZE} characters.")


def _bounded_concat(parts: Iterable[str]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in parts:
        size += len(piece)
        _check_size(size)
        pieces.append(piece)
    return "".join(pieces)


def _check_binop(operator: str, left: Any, right: Any) -> None:
    match operator:
        case "+" if isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right))
        case "*" if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        case "*" if isinstance(left, Sized) and isinstance(right, int):
            _check_size(len(left) * right)
        case "*" if isinstance(left, int) and isinstance(right, Sized):
            _check_size(left * len(right))
        case "**" if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
        case "%" if isinstance(left, str) and _WIDE.search(left):
            raise SecurityError("the chat template formats with a very large width")
        case _:
            pass


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise Bounded("The chat template computes with very large numbers.")


def _join(values: Iterable[object], d: str = "", attribute: str | None = None) -> str:
    items = list(values)
    if attribute is not None:
        items = [item.get(attribute, "") if isinstance(item, dict) else "" for item in items]
    pieces = list(map(str, items))
    _check_size(sum(map(len, pieces)) + len(d) * len(pieces))
    return d.join(pieces)


def _replace(s: object, old: str, new: str, count: int | None = None) -> str:
    text = str(s)
    _check_size(len(text) + (text.count(old) + 1) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(s: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    if (width if isinstance(width, int) else len(width)) > MAX_INDENT:
        raise Bounded(f"The chat template indents by more than {MAX_INDENT}.")
    return FILTERS["indent"](str(s), width, first, blank)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and indent > MAX_INDENT:
        raise Bounded(f"The chat template indents by more than {MAX_INDENT}.")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
