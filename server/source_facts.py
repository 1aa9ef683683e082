"""What a server knows of a model whose encoder reads the prompt, and whose decoder writes the answer."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from typing import cast

import msgspec

from engine_core.protocol import Source
from models.config import ConfigError
from server.errors import BadRequest, invalid


class SourceFacts(msgspec.Struct, frozen=True):
    longest: int
    """The most tokens of a prompt."""
    start: tuple[int, ...]
    """The tokens with which each answer begins, ahead of what is shown."""
    suppressed: tuple[int, ...] = ()
    """Tokens that the checkpoint wants in no answer."""

    def source(self, tokens: list[int]) -> Source:
        """A prompt as the encoder reads it."""
        digest = hashlib.sha256(array("q", tokens).tobytes()).hexdigest()
        return Source(digest, len(tokens), tokens=tokens)

    def check_length(self, length: int) -> None:
        if length == 0:
            raise BadRequest("The encoder prompt cannot be empty", "prompt")
        if length > self.longest:
            raise invalid(
                "input_tokens",
                f"This model's encoder reads {self.longest} tokens at most. However, your prompt contains "
                f"{length} input tokens. Please reduce the length of the input prompt, or have it cut with "
                "truncate_prompt_tokens=-1.",
                length,
            )


def refuse_for_sources(**fields: bool) -> None:
    """Refuses the first field that is asked for; all of them are about prompts that are continued."""
    if asked := [name for name, is_asked in fields.items() if is_asked]:
        raise BadRequest(
            f"{asked[0]}: this model does not continue its prompt: an encoder reads it, and the answer is a "
            "text of its own. Leave the field out.",
            asked[0],
        )


def refuse_chats(known: SourceFacts | None) -> None:
    """Refuses conversations, if the model is known to read sources."""
    if known is not None:
        raise BadRequest(
            "This model reads one text and writes another, and has no chats: POST /v1/completions with the "
            "text as `prompt`.",
            "messages",
        )


def read_source_facts(longest: int, fields: Mapping[str, object]) -> SourceFacts:
    """Finds how answers begin. `fields`: of config.json, below those of generation_config.json."""
    start = _ids(fields, "decoder_start_token_id") or _ids(fields, "bos_token_id")
    if not start:
        raise ConfigError(
            "neither config.json nor generation_config.json has 'decoder_start_token_id', with which answers "
            "begin: say it with --override-generation-config '{\"decoder_start_token_id\": 2}'"
        )
    banned = fields.get("bad_words_ids")
    words = cast("list[object]", banned) if isinstance(banned, list) else []
    alone = [word[0] for word in words if isinstance(word, list) and len(cast("list[object]", word)) == 1]
    never = (*_ids({"bad_words_ids": alone}, "bad_words_ids"), *_ids(fields, "suppress_tokens"))
    return SourceFacts(longest, (*start[:1], *_ids(fields, "forced_bos_token_id")[:1]), never)


def _ids(fields: Mapping[str, object], name: str) -> tuple[int, ...]:
    """The ids of a field that has one, or a list of them, or nothing."""
    value = fields.get(name)
    ids = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise ConfigError(f"generation config: {name} must be a token id, or a list of them, got {value!r}")
    return tuple(cast("list[int]", ids))
