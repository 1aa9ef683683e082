"""Half surrogate pairs: an escape of JSON can spell one, but it is no character, and no UTF-8 holds it."""

from __future__ import annotations


def whole_characters(text: str) -> str:
    """The text with U+FFFD in place of each half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
