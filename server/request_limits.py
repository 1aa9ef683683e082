"""Bounds on what one request may ask, whatever the model is."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Bounds on what one request may ask, whatever the model: no client may starve the others."""

    n: int = 128
    prompts: int = 256
    answers: int = 1024
    """Choices of all prompts of a request."""
    inputs: int = 16384
    """Texts of a request that is pooled."""
    stop_strings: int = 16
    stop_bytes: int = 4096
    stop_token_ids: int = 1024
    logit_bias: int = 1024
    bias: int = 100
    """The most that `logit_bias` adds to a logit, or takes off it."""
    bad_words: int = 128
    bad_word_tokens: int = 1024
    allowed_token_ids: int = 1 << 18
    """More than any vocabulary has."""
    sampling_entries: int = 1 << 21
    """Entries of all these lists together, counted once for each answer of a request: each answer is sent to
    the engine with its own."""
    tools: int = 128
    documents: int = 1024
    template_kwargs: int = 128
    conversation_messages: int = 1 << 16
    """Messages of all conversations of a request."""
    detokenized: int = 16
    """How many times the longest prompt a list of ids may be that is turned into text."""
    new_tokens: int = 1 << 62
    """Tokens of an answer, which is cut there: the operator's own max_new_tokens."""
    fits_context: bool = True
    """Whether more tokens than the context has room for are refused; otherwise its end ends the answer."""


LIMITS = Limits()
NO_LIMITS = Limits(*[1 << 62] * (len(Limits.__struct_fields__) - 1), fits_context=False)
"""For the requests of a program, which is its own operator."""
