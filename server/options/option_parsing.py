"""Reads options from the command line, environment variables, a YAML file or keyword arguments.

No option is known by name here. A struct field with an `OptionDoc` is an option, read as its type says.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import isnan
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

import msgspec

from server.options.argument_errors import nearest, plain_error
from worker.options import OptionDoc

Config = TypeVar("Config", bound=msgspec.Struct)


class OptionError(ValueError):
    """An option that cannot be used; the message is one line and names it."""


@dataclass(frozen=True)
class Option:
    """One row of the option table: a struct field that the operator may set."""

    field: str
    type: Any
    default: Any
    doc: OptionDoc
    struct: type[msgspec.Struct]
    """The struct whose field it is."""

    @property
    def text(self) -> str:
        """What the option is, in the words of the string below its field."""
        return _texts_of(self.struct)[self.field]

    @property
    def flag(self) -> str:
        return flag_of(self.field)

    @property
    def flags(self) -> list[str]:
        return [self.flag, *([self.doc.short] if self.doc.short else [])]

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def is_list(self) -> bool:
        return get_origin(self.type) is list

    @property
    def is_object(self) -> bool:
        return plain_type(self.type) is dict

    @property
    def written_default(self) -> str:
        """The default as the reference page shows it; empty if there is nothing to show."""
        if self.is_switch:
            return "on" if self.default else ""
        if isinstance(self.default, tuple):
            return ",".join(f"{one:g}" for one in self.default)
        return "" if self.default in (None, "", msgspec.NODEFAULT, [], {}) else str(self.default)

    def value(self, given: object, origin: str) -> object:
        """Convert and check a given value; `origin` names its place in errors: a flag, a variable, a file."""
        try:
            value = self._converted(given)
            self._check(value)
        except msgspec.ValidationError as error:
            kind = _KINDS.get(plain_type(self.type))
            if self.doc.choices and not self.is_list:
                kind = f"one of {', '.join(self.doc.choices)}"
            raise OptionError(f"{origin}: {f'{given!r} is not {kind}' if kind else error}") from error
        except ValueError as error:
            raise OptionError(f"{origin}: {error}") from error
        return value

    def _converted(self, given: object) -> object:
        if self.is_list:
            words = _as_list(given)
            if self.doc.choices:  # no choice has a comma, so commas may separate them
                words = [part for word in words for part in str(word).replace(",", " ").split()]
            return msgspec.convert(words, self.type, strict=False)
        if self.doc.read is not None and not isinstance(given, bool | None):
            return self.doc.read(str(given))
        if isinstance(given, str):
            if given.strip().lower() in ("none", "null") and type(None) in get_args(self.type):
                return None
            if self.is_object:
                return json_object(given)
        given = _as_text(given) if plain_type(self.type) is str else given
        return msgspec.convert(given, self.type, strict=False)

    def _check(self, value: object) -> None:
        if value is None:
            return  # the option's type allows it
        doc = self.doc
        for one in value if isinstance(value, list) else [value]:
            known = one in doc.choices or (doc.others is not None and doc.others(str(one)))
            if doc.choices and not known:
                raise ValueError(f"{one!r} is not one of {', '.join(doc.choices)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            if isnan(value):
                raise ValueError("must be a number, got nan")
            if isinstance(value, int) and abs(value) >= 1 << 63:  # no message to an engine holds it
                raise ValueError(f"must be less than 2**63, got {value}")
            if doc.least is not None and value < doc.least:
                raise ValueError(f"must be at least {doc.least:g}, got {value}")
            if doc.most is not None and value > doc.most:
                raise ValueError(f"must be at most {doc.most:g}, got {value}")


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def options_of(struct: type[msgspec.Struct]) -> list[Option]:
    """Collect the fields that have a `OptionDoc`, with those of nested structs in their places."""
    options: list[Option] = []
    for info in msgspec.structs.fields(struct):
        if _is_struct(info.type):
            options += options_of(info.type)
        elif get_origin(info.type) is Annotated:
            bare, doc, *_ = get_args(info.type)
            factory = info.default_factory
            default = info.default if factory is msgspec.NODEFAULT else factory()
            options.append(Option(info.name, bare, default, doc, struct))
    return options


@cache
def _texts_of(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The strings below the fields of a struct, which Python itself does not keep: read from its source."""
    [described] = ast.parse(inspect.getsource(struct)).body
    found: dict[str, str] = {}
    for pair in pairwise(described.body if isinstance(described, ast.ClassDef) else ()):
        match pair:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                found[name] = " ".join(text.split())
            case _:
                pass
    return found


def assemble(struct: type[Config], values: Mapping[str, object]) -> Config:
    """Build a struct from option values, each of which goes to the nested struct that declares it."""
    parts: dict[str, object] = {}
    for info in msgspec.structs.fields(struct):
        if _is_struct(info.type):
            parts[info.name] = assemble(info.type, values)
        elif info.name in values:
            parts[info.name] = values[info.name]
    return struct(**parts)


def flatten(config: msgspec.Struct) -> dict[str, object]:
    """Collect the option values of a struct and its nested structs; `assemble` is the inverse."""
    values: dict[str, object] = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        values.update(flatten(value) if isinstance(value, msgspec.Struct) else {name: value})
    return values


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _as_list(given: object) -> list[object]:
    """Split words, or parse a JSON list, or both: some of the words may be JSON lists."""
    words = given.split() if isinstance(given, str) and not given.lstrip().startswith("[") else given
    items: list[object] = []
    for word in words if isinstance(words, list) else [words]:
        if isinstance(word, str) and word.lstrip().startswith("["):
            items += json.loads(word)
        else:
            items.append(_as_text(word))
    return items


def _as_text(given: object) -> object:
    """A number as text: YAML has no other way to tell a name of digits. Anything else stays as it is."""
    return str(given) if isinstance(given, int | float) and not isinstance(given, bool) else given


def json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f'{text[:60]!r} is not JSON; write an object such as {{"name": 1}}') from error
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


class Parser(argparse.ArgumentParser):
    """An argument parser that raises OptionError where argparse would print usage and exit."""

    options: Sequence[Option] = ()
    """Options whose texts are read when help is asked for, and not before."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(plain_error(message, self.prog, self._option_string_actions))

    def format_help(self) -> str:
        texts = {option.field: _help(option) for option in self.options}
        for action in self._actions:
            action.help = texts.get(action.dest, action.help)
        return super().format_help()


@dataclass(frozen=True)
class VllmFlag:
    """A flag of another server that is no option here."""

    flag: str
    neutral: tuple[str, ...] = ()
    """Values that are accepted because they ask for what happens anyway."""
    is_switch: bool = False
    short: str | None = None
    is_idle: bool = False
    """Whether it is accepted, and changes nothing whatever its value."""
    is_object: bool = False
    is_list: bool = False
    is_gone: bool = False
    """Whether it is refused whatever its value, even one that asks for nothing."""
    instead: str = "is not supported yet"
    """The refusal, behind the flag's name."""

    @property
    def flags(self) -> list[str]:
        return [self.flag, *([self.short] if self.short else [])]

    @property
    def keyword(self) -> str:
        """The flag's name as a keyword argument of Python."""
        return self.flag[2:].replace("-", "_")

    def check(self, value: object) -> None:
        """Raises OptionError unless `value` asks for what happens anyway, as None, false and empty do."""
        if self.is_idle or (value is None if self.is_gone else asks_for_nothing(value)):
            return
        words = value if isinstance(value, list) else [value]
        if self.is_switch or any(str(word) not in self.neutral for word in words):
            shown = " or ".join(self.neutral)
            allowed = f"; leave it out, or give {shown}" if shown else ""
            raise OptionError(f"{self.flag} {self.instead}{allowed}")

    def take(self, value: object, without_effect: list[VllmFlag]) -> None:
        """Check a value, and join `without_effect` if it asks for something that changes nothing here."""
        self.check(value)
        if self.is_idle and not asks_for_nothing(value):
            without_effect.append(self)


def asks_for_nothing(value: object) -> bool:
    """Whether the value of an option that does not exist is none, false or empty, written out or not."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "{}", "[]", "none", "null")
    return value is None or value is False or value in ({}, [], ())


def build_parser(
    command: str, options: Sequence[Option], vllm_flags: Sequence[VllmFlag], epilog: str
) -> argparse.ArgumentParser:
    parser = Parser(
        prog=command,
        usage=f"{command} [MODEL...] [options]",
        epilog=epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    parser.options = options
    groups: dict[str, Any] = {}
    for option in options:
        if option.doc.group not in groups:
            groups[option.doc.group] = parser.add_argument_group(option.doc.group)
        group = groups[option.doc.group]
        group.add_argument(*option.flags, dest=option.field, **argparse_form(option))
    for other in vllm_flags:
        parser.add_argument(*other.flags, dest=other.flag, help=argparse.SUPPRESS, **argparse_form(other))
    return parser


def argparse_form(option: Option | VllmFlag) -> dict[str, Any]:
    if option.is_switch or (isinstance(option, Option) and option.type == bool | None):
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(option, VllmFlag):
        return {"nargs": "+", "metavar": "X"} if option.is_list else {}
    if option.is_list:
        return {"nargs": "+", "metavar": "X", "action": "extend" if option.doc.repeats else "store"}
    kind = {int: "N", float: "X", dict: "JSON"}.get(plain_type(option.type), "TEXT")
    return {"metavar": "{" + ",".join(option.doc.choices) + "}" if option.doc.choices else kind}


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", dict: "a JSON object"}


def plain_type(annotation: Any) -> Any:
    """Strip a type to its class: int | None to int, list[str] to list."""
    first = get_args(annotation)[0] if isinstance(annotation, types.UnionType) else annotation
    return get_origin(first) or first


def _help(option: Option) -> str:
    shown = f" (default: {option.written_default})" if option.written_default else ""
    return (option.text + shown).replace("%", "%%")


_NO_FLAG = re.compile(r"[^-].*|-|--|-[\d.].*|", re.DOTALL)
"""Words of a command line that are values: negative numbers, too."""
ATTACHED = re.compile(r"(-[a-zA-Z])[\d.].*")
"""A flag of one letter with a number or a part behind it, -O3; other letters would be another flag."""


def canonical(arguments: Iterable[str], parser: argparse.ArgumentParser) -> list[str]:
    """Write flags with dashes instead of underscores; an unknown flag is refused with the nearest one."""
    known = parser._option_string_actions  # pyright: ignore[reportPrivateUsage]
    words: list[str] = []
    for argument in arguments:
        attached = ATTACHED.fullmatch(argument)
        if _NO_FLAG.fullmatch(argument) or (attached and attached[1] in known):
            words.append(argument)
            continue
        name, equals, value = argument.partition("=")
        flag = name.replace("_", "-")
        if flag not in known:
            offered = [one for one, action in known.items() if action.help != argparse.SUPPRESS]
            raise OptionError(f"there is no option {name}{nearest(flag, offered)}")
        words.append(flag + equals + value)
    return words


def undotted(arguments: Sequence[str], options: Sequence[Option | VllmFlag]) -> list[str]:
    """Gather flags with dots, --hf-overrides.rope_theta 1e6, in the JSON of the option whose parts they give.

    What stands later counts.
    """
    by_name = {name: option.flag for option in options if option.is_object for name in option.flags}
    dotted = {by_name[name] for name in map(_whose_part, arguments) if name in by_name}
    words: list[str] = []
    objects: dict[str, dict[str, object]] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        head, _, path = name.partition(".")
        flag = by_name.get(head.replace("_", "-"))
        if flag not in dotted:
            words.append(argument)
            continue
        if not equals and (value := next(rest, "")) == "":
            raise OptionError(f"{name} needs a value")
        inner = objects.setdefault(flag, {})
        if path:
            _put(inner, path.replace("-", "_").split("."), value, name)
        else:
            inner.update(_whole(value, flag))
    return [*words, *(word for flag, value in objects.items() for word in (flag, json.dumps(value)))]


def _whose_part(argument: str) -> str | None:
    """The flag before the dot, if this is a flag with a dot."""
    head, dot, _ = argument.partition("=")[0].partition(".")
    return head.replace("_", "-") if dot and head.startswith("-") else None


def _put(inner: dict[str, object], path: list[str], text: str, name: str) -> None:
    *outer, last = path
    for key in outer:
        found = inner.setdefault(key, {})
        if not isinstance(found, dict):
            raise OptionError(f"{name}: {key} is given as something else than an object")
        inner = found
    try:
        inner[last] = json.loads(text)
    except ValueError:
        inner[last] = text


def _whole(text: str, flag: str) -> dict[str, object]:
    try:
        return json_object(text)
    except ValueError as error:
        raise OptionError(f"{flag}: {error}") from error
