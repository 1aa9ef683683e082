"""Control tokens that users write in messages: marks divide them, so that they are encoded as ordinary text.

A document that a user quotes could otherwise end the user's turn and begin one of the system.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

CUT = f"q{secrets.token_hex(12)}w"
"""The mark in a rendered text at which it is divided before it is encoded. Nobody can write it who does not
know it: it is another one in each process."""

_SHORT = 256
"""Characters of a text that is searched at once."""

MEDIA_TOKENS = frozenset(
    (
        "<|grounding|>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>",  # DeepSeek-OCR
        "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",  # Qwen-VL
        "<|quad_start|>", "<|quad_end|>",
        "<ref>", "</ref>", "<box>", "</box>",  # InternVL
        "<asr_text>", "[TRANSCRIBE]",  # Qwen3-ASR, Voxtral
    )
)  # fmt: skip
"""Special tokens with which users ask something about a picture or a sound, as the models' authors document
it. They stay special in messages."""


def without_cuts(text: str) -> str:
    """Returns a rendered text as its users know it."""
    return text.replace(CUT, "") if CUT in text else text


def control_words(added: Iterable[tuple[str, bool]]) -> frozenset[str]:
    """Returns the control tokens among the added tokens of a vocabulary, given as (text, whether special).

    Some vocabularies have markers of turns that are not special.
    """
    return frozenset(
        text
        for text, special in added
        if (special or (text.startswith("<|") and text.endswith("|>")))
        and text not in MEDIA_TOKENS
        and len(text) > 1
        and not all(each.isalnum() or each.isspace() for each in text)  # words that are names of roles, say
    )


class TextDivider:
    """Puts marks into texts wherever one of some words begins, behind its first character."""

    def __init__(self, words: Collection[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize` is what the tokenizer does to a text before it looks for the words, if it does so."""
        pattern = _any_of(sorted(words))
        self._beginnings = {word[:2] for word in words}
        self._any = re.compile(pattern)
        self._each = re.compile(f"(?={pattern})")  # words may overlap
        self._normalize = normalize

    def divide(self, value: Any) -> Any:
        """Returns a JSON value with marks in its texts."""
        if isinstance(value, str):
            clean = self._normalize is None and not self._has_word(value)
            return value if clean else self._divided([value])[0]
        if isinstance(value, dict):
            return dict(zip(self._divide_each(value), self._divide_each(value.values()), strict=True))
        if isinstance(value, list):
            if len(value) > 1 and any(map(_is_text, value)):
                return self._divide_parts(value)
            return self._divide_each(value)
        return value

    def _divide_each(self, values: Iterable[Any]) -> list[Any]:
        """Returns several values with marks. Short texts without words, as most are, cost no call each."""
        found, search = list(values), self._any.search
        for place, each in enumerate(found):
            if each is None or (
                type(each) is str and self._normalize is None and len(each) < _SHORT and not search(each)
            ):
                continue
            found[place] = self.divide(each)
        return found

    def _divide_parts(self, parts: list[Any]) -> list[Any]:
        """Returns the parts of a content, which a template may write one behind the other."""
        texts = iter(self._divided([part["text"] for part in parts if _is_text(part)]))
        return [
            {**self.divide({**part, "text": ""}), "text": next(texts)}
            if _is_text(part)
            else self.divide(part)
            for part in parts
        ]

    def _divided(self, texts: list[str]) -> list[str]:
        """Returns texts with marks also where a word begins in one and ends in another."""
        if (normalize := self._normalize) is not None:
            found = [(text, normalize(text)) for text in texts]
            texts = [normal if self._has_word(normal) else text for text, normal in found]
        bare = [text.strip() for text in texts] if len(texts) > 1 else texts
        joined = "".join(bare)
        if not self._has_word(joined):
            return texts
        places = [found.start() + 1 for found in self._each.finditer(joined)]
        return list(_with_cuts(texts, bare, places))

    def _has_word(self, text: str) -> bool:
        if len(text) < _SHORT:
            return self._any.search(text) is not None
        # nearly all texts have none, which is found out ten times as fast by beginnings
        return any(two in text for two in self._beginnings) and self._any.search(text) is not None


@lru_cache(maxsize=64)
def divider_of(words: frozenset[str]) -> TextDivider | None:
    """Returns what divides these words, or None if there are none."""
    return TextDivider(words) if words else None


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _with_cuts(texts: Sequence[str], bare: Sequence[str], places: Sequence[int]) -> Iterator[str]:
    """Yields the texts with marks. `places` count the characters of all `bare` texts, which are without the
    whitespace around them."""
    start = 0
    for text, inner in zip(texts, bare, strict=True):
        lead, stop = text.find(inner), start + len(inner)
        own = places[bisect_right(places, start) : bisect_right(places, stop)]
        bounds = [0, *(place - start + lead for place in own), len(text)]
        yield CUT.join(text[first:last] for first, last in pairwise(bounds))
        start = stop


def _any_of(words: Sequence[str]) -> str:
    """Returns a pattern for any of these sorted words that takes time by the length of a word, not by their
    number."""
    first, head = words[0], words[0]
    while not words[-1].startswith(head):
        head = head[:-1]
    if head == first:
        return re.escape(head)
    rests = groupby((word[len(head) :] for word in words), key=lambda rest: rest[0])
    return f"{re.escape(head)}(?:{'|'.join(_any_of(list(group)) for _, group in rests)})"
