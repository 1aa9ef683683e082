"""Why no longer prefix of a prompt was cached, in the client's terms: which message, which text, what to do.

The engine says how many leading tokens it knows. The text that is shown around the next one is the request's
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from engine_core.protocol import CacheMiss
from server.text.tokenizer import Tokenizer

TOKENS_BEFORE, TOKENS_AFTER = 8, 16
"""The tokens that are shown before the first one that differs, and from it on."""
HEADER = 64
"""The most characters that a template is taken to write between a message's beginning and its content."""

_PLACED = ("none", "rest_of_block", "other_beginning", "different_token", "new_tokens", "truncated")
"""The reasons for which the first token that does not match says something."""

ADVICE = {
    "none": "Nothing is wrong: all whole blocks of {size} tokens before the last token were cached.",
    "short_prompt": "Nothing is wrong: only prompts of more than {size} tokens have a block to share.",
    "last_token": (
        "Nothing is wrong: the whole prompt is known, but its last token must be computed, and blocks of "
        "{size} tokens are used whole."
    ),
    "rest_of_block": (
        "Nothing is wrong: blocks of {size} tokens are used whole, and the last tokens that match fill none."
    ),
    "first_time": (
        "Nothing is remembered under this cache_salt. The next prompt that begins alike can be served from "
        "the cache, if it has the same salt and goes to the same replica."
    ),
    "other_beginning": (
        "No remembered prompt begins like this one. Put first what your prompts share, such as instructions "
        "and examples, and last what differs."
    ),
    "different_token": (
        "Keep all text before this place exactly as it was in the last request (no times, ids or other "
        "order), or move what changes behind what stays the same."
    ),
    "new_tokens": "Nothing is wrong: what was computed before was found, and this prompt goes on behind it.",
    "evicted": (
        "The blocks were computed, but had to make room for others. Send such prompts closer together, or "
        "enlarge the cache (--kv-cache-memory-bytes, --gpu-memory-utilization)."
    ),
    "reset": (
        "The prefix cache was reset since these tokens were computed. The next such prompt will find them."
    ),
    "computing": (
        "Another request was still computing these tokens. Send one request first, and those that begin "
        "alike when its first token has come."
    ),
    "preempted": (
        "The request that was computing these tokens was preempted. Send fewer at once, or enlarge the cache "
        "(--kv-cache-memory-bytes, --gpu-memory-utilization)."
    ),
    "not_computed": (
        "The request that had these tokens ended before they were computed. The next such prompt will find "
        "them."
    ),
    "state_not_kept": (
        "These tokens are in the cache, but not the state of this model behind them, kept at the ends "
        "of prompts and answers. The next prompt that parts here will find it; --state-snapshots says how "
        "many are kept."
    ),
    "prompt_logprobs": (
        "Logprobs of the prompt need every token computed. Leave prompt_logprobs out, or echo with logprobs."
    ),
    "disabled": "Prefix caching is disabled. Start the server without --no-enable-prefix-caching.",
    "no_cache": "This model computes each text as a whole and keeps no cache.",
    "truncated": (
        "truncate_prompt_tokens has cut the beginning off, so the rest has moved. Drop whole old messages "
        "instead, several at a time, and keep the first ones."
    ),
}
"""What to do, by reason; `size` is the number of tokens of a block."""

_BY_TEMPLATE = (
    " The chat template writes this place, not a message: keep tools, documents, template arguments and "
    "dates as they were."
)


class CacheDiagnosis(msgspec.Struct, kw_only=True):
    """The tokens of a prompt that were cached, and why not more."""

    cached_tokens: int
    prompt_tokens: int
    reason: str
    matched_tokens: int
    """The number of leading tokens equal to those of the longest prompt remembered under the same salt."""
    message: int | None = None
    """The index of the message in which the first token lies that does not match."""
    role: str | None = None
    text_around: str = ""
    """This request's own text around that token."""
    advice: str


class ChatMessage(Protocol):
    @property
    def role(self) -> str: ...

    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class MissedPrompt:
    """A prompt whose miss is to be explained."""

    tokens: list[int]
    cut_left: bool = False
    """Whether truncation has cut its beginning off."""
    text: str | None = None
    """The whole text that the chat template wrote, if there are messages."""
    messages: Sequence[ChatMessage] = ()


def explain_miss(
    asked: MissedPrompt, miss: CacheMiss, cached: int, tokenizer: Tokenizer, block_size: int
) -> CacheDiagnosis:
    reason = miss.reason
    if asked.cut_left and reason in ("other_beginning", "different_token"):
        reason = "truncated"
    found = CacheDiagnosis(
        cached_tokens=cached,
        prompt_tokens=len(asked.tokens),
        reason=reason,
        matched_tokens=miss.matched,
        advice=ADVICE[reason].format(size=block_size),
    )
    if reason in _PLACED and miss.matched < len(asked.tokens):
        _place(found, asked, tokenizer)
    return found


def one_or_all(found: list[CacheDiagnosis]) -> CacheDiagnosis | list[CacheDiagnosis] | UnsetType:
    """The form in which answers hold diagnoses: the one of a single prompt, or a list; unset for none."""
    if not found:
        return UNSET
    return found[0] if len(found) == 1 else found


def _place(found: CacheDiagnosis, asked: MissedPrompt, tokenizer: Tokenizer) -> None:
    """Fill in where the first token lies that does not match."""
    at = found.matched_tokens
    around = asked.tokens[max(0, at - TOKENS_BEFORE) : at + TOKENS_AFTER]
    found.text_around = tokenizer.decode(around, skip_special_tokens=False)
    if asked.text is None or not asked.messages:
        return
    # Counted from the end, because a tokenizer may write special tokens before the text.
    state = tokenizer.text_state(asked.tokens[:at], skip_special_tokens=False)
    offset = len(asked.text) - len(state.push(asked.tokens[at:]) + state.flush())
    found.message = message_at(offset, asked.text, [message.text() for message in asked.messages])
    if found.message is not None:
        found.role = asked.messages[found.message].role
    elif found.reason in ("other_beginning", "different_token"):
        found.advice += _BY_TEMPLATE


def message_at(offset: int, text: str, contents: Sequence[str]) -> int | None:
    """The index of the message at this offset of the text that the template wrote; None if none is there.

    Contents are searched in order. What follows a content at once, such as the mark of its end, belongs to
    its message, because a longer content would have stood there.
    """
    end, unplaced = 0, None
    for index, content in enumerate(contents):
        content = content.strip()
        start = text.find(content, end) if content else -1
        if start < 0:  # such as a tool call, or a content that the template changes
            unplaced = index if unplaced is None else unplaced
            continue
        if offset < start:
            return index if unplaced is None and start - offset <= HEADER else unplaced
        end, unplaced = start + len(content), None
        if offset <= end:
            return index
    return unplaced
