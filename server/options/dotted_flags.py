"""Flags with dots, --hf-overrides.rope_theta 1e6, which give parts of a JSON option."""

from __future__ import annotations

import json
from collections.abc import Sequence

from server.options.option_parsing import Option, OptionError, VllmFlag, json_object


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
