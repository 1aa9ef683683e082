"""Refuses prompts and texts that are empty or longer than the model reads, by their tokens, or by their
characters before they are tokenized; says how many tokens of a prompt are kept that is to be cut.
"""

from __future__ import annotations

from server.errors import BadRequest, invalid
from server.model_facts import Facts
from server.text.tokenizer import Tokenizer

_TO_SHORTEN = "Please reduce the length of the input prompt"
_TO_CUT = (
    "Please reduce its length, or have it cut: with truncate_prompt_tokens=-1, or with `truncate` where the "
    "endpoint has that."
)


def check_prompt_length(length: int, facts: Facts) -> None:
    """Refuses a prompt that leaves no room for one output token, in vLLM's words."""
    sources, most = facts.sources, facts.max_model_len
    if length == 0:
        read_by = "decoder" if sources is None else "encoder"
        raise BadRequest(f"The {read_by} prompt cannot be empty", "prompt")
    if sources is not None:
        if length > sources.longest:
            raise invalid(
                "input_tokens",
                f"This model's encoder reads {sources.longest} tokens at most. However, your prompt contains "
                f"{length} input tokens. {_TO_SHORTEN}, or have it cut with truncate_prompt_tokens=-1.",
                length,
            )
    elif length > most:
        raise _prompt_too_long("input_tokens", f"{length} input tokens", length, most)
    elif length == most:
        raise BadRequest(
            f"The decoder prompt (length {length}) plus the number of requested output tokens (at least "
            f"1) is longer than the maximum model length of {most}. Make sure that "
            "`max_model_len` is no smaller than the number of text tokens plus 1.",
            "prompt",
        )


def kept_tokens(asked: int | None, max_tokens: int | None, facts: Facts) -> int | None:
    """Returns how many tokens of a prompt truncate_prompt_tokens keeps; None keeps all."""
    if asked is None:
        return None
    if asked > facts.longest_prompt:
        raise invalid(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens={asked} cannot be greater than max_model_len = {facts.longest_prompt}. "
            "Please request a smaller truncation size.",
            asked,
        )
    if asked < -1:
        raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens={asked} must be at least -1.", asked)
    if asked == -1 and facts.sources is not None:
        return facts.longest_prompt
    if asked == -1:
        return max(1, facts.max_model_len - max(1, max_tokens or 1))
    return asked


def check_prompt_characters(text: str, facts: Facts, tokenizer: Tokenizer) -> None:
    """Refuses, without tokenizing, a prompt that no cut into tokens could make short enough."""
    most = facts.longest_prompt
    if len(text) > most * tokenizer.longest_token:
        raise _prompt_too_long("input_text", f"{len(text)} characters", len(text), most)


def _prompt_too_long(param: str, found: str, size: int, most: int) -> BadRequest:
    return invalid(
        param,
        f"This model's maximum context length is {most} tokens. However, your prompt contains {found}, which "
        f"exceeds this limit even without any output tokens. {_TO_SHORTEN}.",
        size,
    )


def longest_text(facts: Facts, *, in_windows: bool = False) -> int:
    """The longest text in tokens, of those whose parts may be read one by one or of others."""
    return max(facts.max_text_len, (in_windows and facts.pooling.max_embed_len) or 0)


def check_text_tokens(
    ids: list[int], param: str, index: int, facts: Facts, *, in_windows: bool = False
) -> None:
    """Refuses tokens that cannot be pooled, and tells which of a request's texts they are."""
    facts.check_token_ids(ids, param)
    if not ids:
        raise BadRequest(f"The decoder prompt cannot be empty ({param} {index} has no tokens).", param)
    most, size = longest_text(facts, in_windows=in_windows), len(ids)
    if size > most:
        raise _text_too_long("input_tokens", f"{param} {index}", f"{size} input tokens", size, most)


def check_query_or_document(ids: list[int], param: str, index: int, facts: Facts, *, query: bool) -> None:
    """Refuses a text of which the model reads less, as a query or as a document."""
    most, size = facts.pooling.texts.most_tokens(query=query), len(ids)
    if most is not None and size > most:
        raise invalid(
            "input_tokens",
            f"This model reads a {'query' if query else 'document'} of up to {most} tokens, and {param} "
            f"{index} has {size}. {_TO_CUT}",
            size,
        )


def check_text_characters(
    size: int, text: str, facts: Facts, tokenizer: Tokenizer, *, in_windows: bool = False
) -> None:
    """Refuses, without tokenizing, a text of so many characters that no cut into tokens could make short
    enough; `text` says which one it is."""
    most = longest_text(facts, in_windows=in_windows)
    if size > most * tokenizer.longest_token:
        raise _text_too_long("input_text", text, f"{size} characters", size, most)


def _text_too_long(param: str, text: str, found: str, size: int, most: int) -> BadRequest:
    return invalid(
        param,
        f"This model's maximum context length is {most} tokens. However, {text} contains {found}. {_TO_CUT}",
        size,
    )
