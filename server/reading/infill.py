"""Prompts that have a model fill the place between two texts, as models of code are trained to."""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import BadRequest
from server.schemas.completions import CompletionRequest
from server.text.tokenizer import Tokenizer

_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder2, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
"""The tokens of each family before the text, before what stands behind the place, and before the answer."""


def write_infill(prefix: str, suffix: str, tokenizer: Tokenizer) -> str:
    """The prompt for the text between two others. Raises BadRequest if the vocabulary has no such tokens."""
    for form in _FORMS:
        if all(token in tokenizer.added_tokens for token in form):
            return f"{form[0]}{prefix}{form[1]}{suffix}{form[2]}"
    raise BadRequest(
        "`suffix`: this model's vocabulary has no tokens for a place to fill, such as <|fim_middle|>. Ask a "
        "model of code that has some, or leave it out.",
        "suffix",
    )


def prompts_of(body: CompletionRequest, tokenizer: Tokenizer) -> Sequence[str | list[int]]:
    """The prompts of a body, with what stands behind the place to fill if it names that."""
    suffix, texts = body.suffix or "", body.prompt
    if (prefix := body.fill_prefix) is not None:
        return [write_infill(prefix, suffix, tokenizer) + str(text) for text in texts]
    return [write_infill(str(text), suffix, tokenizer) for text in texts] if suffix else texts
