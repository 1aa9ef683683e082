"""Parts of conversations that are embeddings in place of tokens: marks stand for them while templates run."""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import BadRequest
from server.media.media_parts import ROWS
from server.media.prompt import Placed, Rows, rows_mark
from server.model_facts import Facts
from server.schemas.messages import Message
from server.schemas.sampling_fields import GenerationBody


def take_row_files(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """The messages with a text that marks the place of each file of embeddings, and these files in base64."""
    files: list[str] = []

    def stand_in(part: dict[str, str]) -> dict[str, str]:
        if part["type"] != ROWS:
            return part
        files.append(part["data"])
        return {"type": "text", "text": rows_mark(len(files) - 1)}

    def marked(message: Message, parts: list[dict[str, str]]) -> Message:
        return message.model_copy(update={"content": [stand_in(part) for part in parts]})

    return [
        marked(message, message.content) if isinstance(message.content, list) else message
        for message in messages
    ], files


def with_rows(
    ids: list[int],
    placed: list[Placed],
    files: Sequence[str],
    facts: Facts,
    keep: int | None = None,
    *,
    left: bool = True,
) -> tuple[list[int], list[Placed], list[Rows]]:
    """The prompt with these embeddings in place, cut to `keep` tokens, the last ones if `left`."""
    from server.media.prompt_embeds import place_rows  # NumPy is imported with the first of them

    return place_rows(ids, placed, files, facts, keep, left=left)


def check_shows_no_tokens(body: GenerationBody, param: str) -> None:
    """Refuses what would show tokens of a prompt that has embeddings."""
    if body.echo or body.prompt_logprobs is not None:
        raise BadRequest(
            "echo and prompt_logprobs show tokens of a prompt, and prompt_embeds are none: leave them out.",
            param,
        )
