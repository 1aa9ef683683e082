"""What a dialect says of a family of models: how it writes calls, and the markers of its reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from server.output_parsing.formats.call_format import CallFormat


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way to write tool calls, of a family of models."""

    name: str
    """Its name in the options, which is the peers'."""
    opens: tuple[str, ...]
    """The literals with which calls begin."""
    format: CallFormat
    opens_bare: tuple[str, ...] = ()
    """Literals with which calls begin if the model has left their opener out."""
    only_first: tuple[str, ...] = ()
    """The openers that mean nothing behind other text, because text may have them too."""
    before_first: str = ""
    """What the model writes before its first call if there is no text, behind any reasoning."""
    between: str = ""
    """What the model writes between two calls, if it is not space."""
    hides: tuple[str, ...] = ()
    """Markup around the text of an answer, which is no part of it."""
    keeps_space: bool = False
    """Whether the family writes no space between text and calls, so that what stands there is text."""


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The literals around the reasoning of a model."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    hides: tuple[str, ...] = ()
    """Markup around the text of an answer, which is no part of it."""
    then: str = ""
    """What stands between the reasoning and an answer or a call."""
    answers: str = ""
    """What stands before the text of an answer, if that is held to a form."""
    always_closes: bool = False
    """Whether the model never forgets `closes`, so that what looks like a call before is reasoning."""
    in_text: bool = False
    """Whether reasoning stays in the text of an answer, with its markers."""
    told_by: tuple[str, ...] = ()
    """The literals by which it is recognized, if `closes` stand for other things in other families."""


NO_MARKERS = ThinkingMarkers("", (), ())
