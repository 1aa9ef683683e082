"""How many tokens a request took."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


def count(prompt: int, completion: int, cached: int | None = None) -> Usage:
    """`cached` is None where the operator did not ask to tell it."""
    return Usage(
        prompt_tokens=prompt,
        total_tokens=prompt + completion,
        completion_tokens=completion,
        prompt_tokens_details=UNSET if cached is None else PromptTokensDetails(cached),
    )
