"""Says in plain words what argparse has found wrong with a command line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_KINDS = {"int": "a whole number", "float": "a number"}
_ARGUMENT = re.compile(r"argument ([^\s/:]+)\S*: (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: (.*) \(choose from (.*)\)", re.DOTALL)


def plain_error(message: str, program: str, flags: Iterable[str]) -> str:
    """What argparse says, for people. `flags` are those of the program."""
    if found := _ARGUMENT.fullmatch(message):
        name, said = found.groups()
        kind, _, value = said.removeprefix("invalid ").partition(" value: ")
        if said.startswith("expected "):
            return f"{name} needs a value"
        if value:
            return f"{name}: {value} is not {_KINDS.get(kind, kind)}"
        if choice := _CHOICE.fullmatch(said):
            of = f"{name}: " if name.startswith("-") else ""
            return f"{of}{choice[1]} is not one of " + choice[2].replace("'", "")
        if said.startswith("ignored explicit argument "):
            return f"{name} is given without a value"
        return f"{name}: {said}"
    about, _, words = message.partition(": ")
    if about == "the following arguments are required":
        return f"{program}: {words} is missing; {program} --help shows how it is written"
    word = words.partition(" ")[0]
    if about == "unrecognized arguments" and word.startswith("-"):
        return f"there is no option {word}{nearest(word, flags, f'{program} --help lists them')}"
    return f"{words!r} is too much; {program} --help shows what it takes" if words else message


def nearest(name: str, known: Iterable[str], otherwise: str = "--help lists them") -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else f"; {otherwise}"
