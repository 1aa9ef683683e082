"""How answers of one model are read, with a mark in place of each special token of its markup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from engine_core.protocol import Thinking
from server.answers.dialects import DIALECTS_BY_NAME, THINKING_BY_NAME, Dialect, ThinkingMarkers
from server.answers.response_template import NAME, described_calls, described_thinking
from server.text.detokenizer import FIRST_MARK, is_mark

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer

NO_REASONING = "thinking_token_budget: it is not known how this model marks its reasoning"

_NO_MARKUP = ("name", "keys", "numbered_by")
"""Fields of dialects whose texts are names, and never special tokens."""

Described = TypeVar("Described")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How answers of a model are read."""

    dialect: Dialect | None = None
    thinking: ThinkingMarkers | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    """The mark that stands for each special token of the markup."""
    written: Mapping[str, str] = field(default_factory=dict)
    """The text of each mark."""
    opens: tuple[str, ...] = ()
    """What opens the reasoning, as a chat template writes it."""
    opener: str = ""
    """What the model writes before calls, of all that may stand there."""
    described: Mapping[str, Any] | None = None
    """The checkpoint's own description, of which the dialect or the thinking was made."""

    @property
    def tokens(self) -> dict[str, int]:
        """The special token of each mark."""
        return {mark: id for id, mark in self.marks.items()}

    @property
    def tells_calls(self) -> bool:
        """Whether a grammar can tell calls from text: an opener of several special tokens opens text too."""
        return is_mark(self.opener) or not is_mark(self.opener[:1])

    def as_written(self, text: str) -> str:
        """A text in which marks are special tokens again."""
        return "".join(self.written.get(char, char) for char in text)

    def begins_thinking(self, prompt: str) -> bool:
        """Whether this prompt has opened the reasoning already."""
        return bool(self.opens) and prompt.rstrip().endswith(tuple(opener.rstrip() for opener in self.opens))

    def leaves_thinking_open(self, prompt: str) -> bool:
        """Whether the last marker of reasoning in a prompt, which may be any text, is one that opens it."""
        closes = self.thinking.closes if self.thinking else ()
        closed = max((prompt.rfind(self.as_written(literal)) for literal in closes), default=-1)
        return max((prompt.rfind(literal.rstrip()) for literal in self.opens), default=-1) > closed

    def thinking_within(
        self, tokenizer: Tokenizer, budget: int | None, *, is_open: bool, calls: bool = False
    ) -> Thinking:
        """What the engine is told of where an answer thinks, and how long it may.

        `is_open`: the prompt has opened the reasoning. A call ends it too, if there are `calls`.
        """

        def tokens(literals: Sequence[str]) -> tuple[tuple[int, ...], ...]:
            texts = map(self.as_written, literals)
            return tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)

        thinking = self.thinking
        return Thinking(
            budget=budget,
            marker=tokens(thinking.closes[:1])[0] if thinking else (),
            open=is_open,
            opens=tokens(thinking.opens) if thinking else (),
            ends=tokens([self.opener]) if calls and self.opener else (),
        )


def format_of_names(
    dialect: str, thinking: str, tokens: Mapping[str, int], opener: str, described: Mapping[str, Any] | None
) -> AnswerFormat:
    """A format that another process has found, by its names, which are empty where there is none."""
    calls = described_calls(described or {}) if dialect == NAME else DIALECTS_BY_NAME.get(dialect)
    markers = described_thinking(described or {}) if thinking == NAME else THINKING_BY_NAME.get(thinking)
    return format_with(calls, markers, tokens, opener)


def format_with(
    dialect: Dialect | None, thinking: ThinkingMarkers | None, tokens: Mapping[str, int], opener: str
) -> AnswerFormat:
    """The format of answers with marks in place of these special tokens. `opener` opens calls."""
    names = sorted(tokens, key=len, reverse=True)
    marks = {token: chr(FIRST_MARK + number) for number, token in enumerate(names)}
    return AnswerFormat(
        None if dialect is None else with_marks(dialect, marks),
        None if thinking is None else with_marks(thinking, marks),
        {tokens[token]: mark for token, mark in marks.items()},
        {mark: token for token, mark in marks.items()},
        () if thinking is None else thinking.opens,
        with_marks(opener, marks),
    )


def with_marks(described: Described, marks: Mapping[str, str]) -> Described:
    """The same dialect, markers or literal, with the mark of each special token in place of its text."""

    def marked(text: str) -> str:
        for token, mark in marks.items():
            text = text.replace(token, mark)
        return text

    return _with_literals(described, marked)


def literals_of(described: object) -> list[str]:
    """All literals of a dialect or of markers."""
    found: list[str] = []

    def collect(text: str) -> str:
        found.append(text)
        return text

    _with_literals(described, collect)
    return found


def _with_literals(value: Any, change: Callable[[str], str]) -> Any:
    """The same with every literal changed. Values of mappings are none."""
    match value:
        case str():
            return change(value)
        case tuple():
            return tuple(_with_literals(each, change) for each in value)
        case Mapping():
            return {change(key): each for key, each in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            literals = [each.name for each in fields(value) if each.name not in _NO_MARKUP]
            return replace(value, **{name: _with_literals(getattr(value, name), change) for name in literals})
        case _:
            return value
