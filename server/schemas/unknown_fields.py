"""Decides what becomes of a body's fields that its endpoint does not have.

A field that is one slip away from one of the endpoint's is a mistake, and is refused with the right name. Any
other is let through, and the client is told that it has no effect; a server with --strict-fields refuses it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

import msgspec

from server.errors import ApiError, BadRequest

Dialects = Mapping[str, tuple[str, str]]
"""Field of another API -> the path and the dialect in which it is taken."""

FOREIGN = frozenset({"mode", "models", "typical"})
"""Fields of other servers that are one letter away from one of ours, and no slips."""

_REPORTED = 5
_SHOWN = 64
_MOST_UNKNOWN = 64
"""The most unknown fields that an object may have; they are compared with all known ones."""
_SHORTEST = 4
"""The letters that a field has at least of which one may be missing, doubled or moved."""
_EXCHANGED = 6
"""The letters that a field has at least of which one may be another: top_a is not top_p."""


class FieldNotes(msgspec.Struct):
    """What was found out about the names of a body's fields while it was read."""

    strict: bool = False
    """Whether unknown fields are refused."""
    foreign: list[str] = []
    """The fields without effect, as they can be told."""
    names: dict[str, str] = {}
    """Fields of ours, and the other names under which the client has sent them."""
    paths: dict[str, str] = {}
    """Fields that the client has sent in an object, and their paths."""

    @property
    def client_names(self) -> dict[str, str]:
        """Fields of ours, and what the client calls those that it calls otherwise."""
        return {**self.paths, **{ours: self.paths.get(theirs, theirs) for ours, theirs in self.names.items()}}

    @property
    def warning(self) -> str:
        """What the client is told of fields without effect."""
        more = f" and {len(self.foreign) - _REPORTED} more" if len(self.foreign) > _REPORTED else ""
        return f"fields without effect: {', '.join(self.foreign[:_REPORTED])}{more}"

    def tell_no_effect(self, name: str) -> None:
        """Notes a known field that has no effect as it was sent. Raises BadRequest if such are refused."""
        if self.strict:
            raise BadRequest(f"`{name}` has no effect here as it was sent. Leave it out.", name)
        self.foreign.append(name)


def note_name(notes: FieldNotes | None, ours: str, theirs: str) -> None:
    """Notes the name under which the client has sent a field of ours."""
    if notes is not None:
        notes.names[ours] = theirs


def find_unknown(
    names: list[str], known: Collection[str], of_dialects: Dialects, notes: FieldNotes | None
) -> None:
    """Notes fields that an object does not have. Raises BadRequest if one is a slip, or has to be refused;
    without notes, all have to be."""
    if notes is None or notes.strict or len(names) > _MOST_UNKNOWN:
        raise _refused(names, known, of_dialects)
    if wrong := [name for name in names if name in of_dialects or _meant(name, known) is not None]:
        raise _refused(wrong, known, of_dialects)
    told = [printable(name[:_SHOWN]) for name in names]
    notes.foreign += [name for name in told if name not in notes.foreign]


def in_clients_words(error: ApiError, names: Mapping[str, str]) -> None:
    """Has an error call fields by the names under which the client has sent them. `names` has those of ours
    that have others."""
    param = error.param or ""
    for ours, theirs in names.items():
        name = re.escape(ours)
        if param.removeprefix("body.").split(".")[0] == ours:
            word = rf"(?:(?<![\w.])|(?<=\bbody\.)){name}(?!\w)"
            error.param = param.replace(ours, theirs, 1)
        else:
            word = f"(?<=`){name}(?=`)"
        error.message, error.sentence = (
            re.sub(word, theirs, text) for text in (error.message, error.sentence)
        )


def printable(name: str) -> str:
    """A field's name with half surrogate pairs replaced, since an answer could not be encoded with them."""
    return name.encode("utf-8", "replace").decode()


def _refused(names: list[str], known: Collection[str], of_dialects: Dialects) -> BadRequest:
    hints = "; ".join(_hint(name[:_SHOWN], known, of_dialects.get(name)) for name in names[:_REPORTED])
    more = f" (and {len(names) - _REPORTED} more)" if len(names) > _REPORTED else ""
    return BadRequest(f"Unknown field: {hints}{more}", param=printable(names[0][:_SHOWN]))


def _hint(name: str, known: Collection[str], dialect: tuple[str, str] | None) -> str:
    if dialect is not None:
        return f"`{name}`, which {dialect[0]} takes with the header `X-Facet-Dialect: {dialect[1]}`."
    near = _meant(name, known) or next(iter(difflib.get_close_matches(name, known, n=1)), None)
    advice = f"did you mean `{near}`?" if near else "the fields of this endpoint are listed at /docs."
    return f"`{printable(name)}`, {advice}"


def _meant(name: str, known: Collection[str]) -> str | None:
    """The known field of which this name is a slip."""
    given = _letters(name)
    is_foreign = name in FOREIGN or len(name) > _SHOWN
    return None if is_foreign else next((each for each in known if _is_slip(given, _letters(each))), None)


def _letters(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _is_slip(given: str, known: str) -> bool:
    """Whether one letter is missing, one too many, another, or two have changed places; or it is a plural."""
    if given == known:
        return True
    most = min(len(given), len(known))
    if len(known) < _SHORTEST or abs(len(given) - len(known)) > 2:
        return False
    start = next((at for at in range(most) if given[at] != known[at]), most)
    rest = most - start
    end = next((at for at in range(rest) if given[-1 - at] != known[-1 - at]), rest)
    left, right = given[start : len(given) - end], known[start : len(known) - end]
    match len(left), len(right):
        case (1, 0) | (0, 1):
            return True
        case (1, 1):
            return len(known) >= _EXCHANGED and left.isalpha() and right.isalpha()
        case (2, 2):
            return left == right[::-1]
        case _:
            return {left, right} == {"y", "ies"}
