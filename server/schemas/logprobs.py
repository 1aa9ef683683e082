"""The three shapes of logprobs in answers: of completions, of chat completions, and of prompts.

A `TokenLogprobs` of the engine names its chosen token first, then the most likely ones in falling order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from server.text.tokenizer import Tokenizer
from worker.protocol import TokenLogprobs

LOWEST = -9999.0
"""A number that stands for minus infinity, which JSON cannot say."""


class CompletionLogprobs(msgspec.Struct):
    """Logprobs as parallel lists. The first token of an echoed prompt has null, since none is before it."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, more: CompletionLogprobs) -> None:
        self.text_offset += more.text_offset
        self.token_logprobs += more.token_logprobs
        self.tokens += more.tokens
        self.top_logprobs += more.top_logprobs


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TokenNames(msgspec.Struct, frozen=True):
    """Spells the tokens of an answer: as their text, or as `token_id:123`, which is unique."""

    tokenizer: Tokenizer
    as_ids: bool
    hides_special: bool

    def __call__(self, id: int) -> str:
        return f"token_id:{id}" if self.as_ids else self.tokenizer.token_text(id)

    def raw(self, id: int) -> list[int]:
        return list(self.tokenizer.token_bytes(id))

    def text_of(self, ids: list[int]) -> str:
        """The text of tokens, as an answer shows it."""
        return self.tokenizer.decode(ids, skip_special_tokens=self.hides_special)

    def offsets(self, ids: Iterable[int], start: int) -> tuple[list[int], int]:
        """The position of each token in the text, in characters, and the position after the last one."""
        offsets: list[int] = []
        for id in ids:
            offsets.append(max(0, start))
            start += self._width(id)
        return offsets, start

    def begin(self, ids: Iterable[int], text: str) -> int:
        """The position at which tokens begin that end where a text does: it lacks the space before its first
        word, and special tokens of a prompt."""
        return min(0, len(text) - sum(map(self._width, ids)))

    def _width(self, id: int) -> int:
        if self.hides_special and id in self.tokenizer.special_ids:
            return 0
        # A character belongs to the token with its first byte.
        return sum(byte & 0xC0 != 0x80 for byte in self.tokenizer.token_bytes(id))


def completion_logprobs(
    ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    names: TokenNames,
    offsets: list[int],
) -> CompletionLogprobs:
    logprobs = CompletionLogprobs(offsets, [], [], [])
    for id, entry in zip(ids, entries, strict=True):
        logprobs.tokens.append(names(id))
        logprobs.token_logprobs.append(None if entry is None else _finite(entry.values[0]))
        # The chosen token is first; if it is also among the most likely, the dict holds it once.
        logprobs.top_logprobs.append(
            None if entry is None else {names(token): _finite(value) for token, value in _distinct(entry)}
        )
    return logprobs


def chat_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], names: TokenNames
) -> list[ChatTokenLogprob]:
    """Logprobs for chat. The chosen token is among its top_logprobs only if it is likely enough."""
    return [
        ChatTokenLogprob(
            token=names(id),
            logprob=_finite(entry.values[0]),
            bytes=names.raw(id),
            top_logprobs=[
                TopLogprob(names(token), _finite(value), names.raw(token))
                for token, value in zip(entry.ids[1:], entry.values[1:], strict=True)
            ],
        )
        for id, entry in zip(ids, entries, strict=True)
    ]


def prompt_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames) -> PromptLogprobs:
    """Logprobs with one entry for each prompt token; the first is null."""
    table: PromptLogprobs = [None]
    for entry in entries:
        ranks = {token: rank for rank, token in enumerate(entry.ids[1:], start=1)}
        table.append(
            {
                str(token): PromptLogprob(_finite(value), ranks.get(token, entry.rank), names(token))
                for token, value in _distinct(entry)
            }
        )
    return table


def _distinct(entry: TokenLogprobs) -> Iterator[tuple[int, float]]:
    """Yields the chosen token, then the other ones."""
    chosen = entry.ids[0]
    yield chosen, entry.values[0]
    for token, value in zip(entry.ids[1:], entry.values[1:], strict=True):
        if token != chosen:
            yield token, value


def _finite(value: float) -> float:
    return max(value, LOWEST)
