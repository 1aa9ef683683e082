"""From struct fields to a command line, environment variables and a YAML file: one table, three ways in.

Knows no option by name. A field becomes an option through its `Doc`; the field's type says how it is read.
"""

from __future__ import annotations

import argparse
import difflib
import json
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import msgspec

from worker.options import Doc

Config = TypeVar("Config", bound=msgspec.Struct)


class OptionError(ValueError):
    """What the operator wrote cannot be used. One line that names the option."""


@dataclass(frozen=True)
class Option:
    field: str
    type: Any
    default: Any
    doc: Doc

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

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
    def written_default(self) -> str:
        """Empty if there is nothing to write."""
        if self.is_switch:
            return "on" if self.default else ""
        if isinstance(self.default, tuple):
            return ",".join(f"{one:g}" for one in self.default)
        return "" if self.default in (None, "", msgspec.NODEFAULT, [], {}) else str(self.default)

    def value(self, given: object, origin: str) -> object:
        """The value that was written on the command line, in a variable or in a file, checked."""
        try:
            value = self._converted(given)
            self._check(value)
        except msgspec.ValidationError as error:
            kind = _KINDS.get(_plain(self.type))
            raise OptionError(f"{origin}: {f'{given!r} is not {kind}' if kind else error}") from error
        except ValueError as error:
            raise OptionError(f"{origin}: {error}") from error
        return value

    def _converted(self, given: object) -> object:
        if self.is_list:
            words = _as_list(given)
            if self.doc.choices:  # none of them has a comma, so commas may part them
                words = [part for word in words for part in str(word).replace(",", " ").split()]
            return msgspec.convert(words, self.type, strict=False)
        if self.doc.read is not None and not isinstance(given, bool | None):
            return self.doc.read(str(given))
        if isinstance(given, str):
            if get_origin(self.type) is dict:
                return _json_object(given)
            if given.strip().lower() in ("none", "null") and self.default is None:
                return None
        return msgspec.convert(given, self.type, strict=False)

    def _check(self, value: object) -> None:
        doc = self.doc
        for one in value if isinstance(value, list) else [value]:
            if doc.choices and one not in doc.choices:
                raise ValueError(f"{one!r} is not one of {', '.join(doc.choices)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            if doc.least is not None and value < doc.least:
                raise ValueError(f"must be at least {doc.least:g}, got {value}")
            if doc.most is not None and value > doc.most:
                raise ValueError(f"must be at most {doc.most:g}, got {value}")


def options_of(struct: type[msgspec.Struct]) -> list[Option]:
    """An option for each field with a `Doc`; those of a nested struct stand where it stands."""
    options: list[Option] = []
    for info in msgspec.structs.fields(struct):
        if _is_struct(info.type):
            options += options_of(info.type)
        elif (doc := _doc_of(info.type)) is not None:
            factory = info.default_factory
            default = info.default if factory is msgspec.NODEFAULT else factory()
            options.append(Option(info.name, _bare(info.type), default, doc))
    return options


def assemble(struct: type[Config], values: Mapping[str, object]) -> Config:
    """Builds a struct from option values, each of which goes to the nested struct that declares it."""
    parts: dict[str, object] = {}
    for info in msgspec.structs.fields(struct):
        if _is_struct(info.type):
            parts[info.name] = assemble(info.type, values)
        elif info.name in values:
            parts[info.name] = values[info.name]
    return struct(**parts)


def flatten(config: msgspec.Struct) -> dict[str, object]:
    """Option values of a struct and of those nested in it: what `assemble` builds it from."""
    values: dict[str, object] = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        values.update(flatten(value) if isinstance(value, msgspec.Struct) else {name: value})
    return values


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _doc_of(annotation: Any) -> Doc | None:
    return next((extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Doc)), None)


def _bare(annotation: Any) -> Any:
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation


def _as_list(given: object) -> list[object]:
    """Words, or a JSON list, or words of which some are JSON lists."""
    words = given.split() if isinstance(given, str) and not given.lstrip().startswith("[") else given
    items: list[object] = []
    for word in words if isinstance(words, list) else [words]:
        if isinstance(word, str) and word.lstrip().startswith("["):
            items += json.loads(word)
        else:
            items.append(word)
    return items


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


class Parser(argparse.ArgumentParser):
    """Tells what is wrong by an error, and leaves what is shown of it to others."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


@dataclass(frozen=True)
class Foreign:
    """An option of the peer that has no meaning here yet, or none at all."""

    flag: str
    neutral: tuple[str, ...] = ()
    """Values that ask for what happens anyway."""
    is_switch: bool = False
    short: str | None = None
    harmless: bool = False
    """Accepted whatever its value: it asks for nothing that is not so already."""

    @property
    def keyword(self) -> str:
        return self.flag[2:].replace("-", "_")

    def check(self, value: object) -> None:
        asked = value if self.is_switch else str(value) not in self.neutral
        if asked and not self.harmless:
            allowed = f"; leave it out, or give {' or '.join(self.neutral)}" if self.neutral else ""
            raise OptionError(f"{self.flag} is not supported yet{allowed}")


def build_parser(
    command: str, options: Sequence[Option], foreign: Sequence[Foreign], epilog: str
) -> argparse.ArgumentParser:
    parser = Parser(
        prog=command,
        usage=f"{command} [MODEL] [options]",
        epilog=epilog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    groups: dict[str, Any] = {}
    for option in options:
        if option.doc.group not in groups:
            groups[option.doc.group] = parser.add_argument_group(option.doc.group)
        group = groups[option.doc.group]
        group.add_argument(*option.flags, dest=option.field, help=_help(option), **_argparse_form(option))
    for other in foreign:
        flags = [other.flag, *([other.short] if other.short else [])]
        form: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if other.is_switch else {}
        parser.add_argument(*flags, dest=other.flag, help=argparse.SUPPRESS, **form)
    return parser


def _argparse_form(option: Option) -> dict[str, Any]:
    if option.is_switch or option.type == bool | None:
        return {"action": argparse.BooleanOptionalAction}
    if option.is_list:
        return {"nargs": "+", "metavar": "X"}
    return {
        "metavar": "{" + ",".join(option.doc.choices) + "}" if option.doc.choices else _metavar(option.type)
    }


def _metavar(annotation: Any) -> str:
    return {int: "N", float: "X", dict: "JSON"}.get(_plain(annotation), "TEXT")


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", dict: "a JSON object"}


def _plain(annotation: Any) -> Any:
    """int for int | None, list for list[str]."""
    if isinstance(annotation, types.UnionType):
        annotation = get_args(annotation)[0]
    return get_origin(annotation) or annotation


def _help(option: Option) -> str:
    shown = f" (default: {option.written_default})" if option.written_default else ""
    return (option.doc.text + shown).replace("%", "%%")


def canonical(arguments: Iterable[str], parser: argparse.ArgumentParser) -> list[str]:
    """Underscores in flags are dashes; a flag that does not exist is refused with the nearest that does."""
    known = set(parser._option_string_actions)  # pyright: ignore[reportPrivateUsage]
    words: list[str] = []
    for argument in arguments:
        if not argument.startswith("--") or argument == "--":
            words.append(argument)
            continue
        name, equals, value = argument.partition("=")
        flag = name.replace("_", "-")
        if flag not in known:
            raise OptionError(f"there is no option {name}{_nearest(flag, known)}")
        words.append(flag + equals + value)
    return words


def from_environment(options: Sequence[Option], environ: Mapping[str, str], prefix: str) -> dict[str, object]:
    """Variables named prefix + FLAG, in capitals with underscores."""
    by_name = {prefix + option.field.upper(): option for option in options}
    found: dict[str, object] = {}
    for name, text in environ.items():
        if not name.startswith(prefix) or _is_kubernetes_link(name, text, prefix):
            continue
        if name not in by_name:
            raise OptionError(f"environment: {name} is no option of this server{_nearest(name, by_name)}")
        found[by_name[name].field] = by_name[name].value(text, f"environment variable {name}")
    return found


def _is_kubernetes_link(name: str, text: str, prefix: str) -> bool:
    """Kubernetes tells containers of a service of our name by such variables, PORT=tcp://… and others."""
    return name.startswith((prefix + "SERVICE_", prefix + "PORT_")) or text.startswith(("tcp://", "udp://"))


def from_file(options: Sequence[Option], path: Path) -> dict[str, object]:
    """A YAML file of flags without their dashes."""
    import yaml  # only here, for those who use a file

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise OptionError(f"--config {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise OptionError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise OptionError(f"--config {path} must hold 'option: value' lines")
    by_name = {option.field: option for option in options}
    found: dict[str, object] = {}
    for key, given in content.items():
        field = str(key).lstrip("-").replace("-", "_")
        if field not in by_name:
            raise OptionError(f"{path}: there is no option {key}{_nearest(field, by_name)}")
        found[field] = by_name[field].value(given, f"{path}: {key}")
    return found


def from_keywords(
    options: Sequence[Option], foreign: Sequence[Foreign], keywords: Mapping[str, object]
) -> dict[str, object]:
    """Keyword arguments of a Python call. None is an option that was not given."""
    by_name = {option.field: option for option in options}
    elsewhere = {other.keyword: other for other in foreign}
    found: dict[str, object] = {}
    for name, given in keywords.items():
        field = name.replace("-", "_")
        if field not in by_name and field not in elsewhere:
            nearest = _nearest(field, [*by_name, *elsewhere], "they are those of `serve`")
            raise OptionError(f"there is no option {name}{nearest}")
        if given is None:
            continue
        if field in by_name:
            found[field] = by_name[field].value(_written(by_name[field], given), field)
        elif given is not False and given not in ({}, [], ()):
            elsewhere[field].check(given)
    return found


def _written(option: Option, given: object) -> object:
    """The Python value as a file could hold it: a text is one item of a list, a path or a dtype is a text."""
    if option.is_list and isinstance(given, str):
        return [given]
    if option.is_list and isinstance(given, tuple | set | frozenset):
        return list(given)
    return str(given) if _plain(option.type) is str else given


def _nearest(name: str, known: Iterable[str], otherwise: str = "--help lists them") -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; {otherwise}"
