"""The bodies of POST /prewarm, which are those of other endpoints, and its answer."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Tag

from server.api.chat import ChatRequest
from server.api.completions import CompletionRequest
from server.api.pooling_bodies import EmbeddingRequest
from server.errors import BadRequest


def _form(body: object) -> str:
    given = body if isinstance(body, dict) else {}
    for name, form in (("input", "(texts)"), ("messages", "(chat)"), ("prompt", "(text)")):
        if given.get(name) is not None:
            return form
    if "prompt_embeds" in given:
        return "(text)"
    raise BadRequest(
        "Give what shall be computed ahead: `messages` as for /v1/chat/completions, `prompt` as for "
        "/v1/completions, or `input` as for /v1/embeddings."
    )


PrewarmRequest = Annotated[
    Annotated[ChatRequest, Tag("(chat)")]
    | Annotated[CompletionRequest, Tag("(text)")]
    | Annotated[EmbeddingRequest, Tag("(texts)")],
    Discriminator(_form),
]


class PrewarmAnswer(msgspec.Struct, kw_only=True):
    """What became of all prompts of a request together, in tokens."""

    id: str
    object: str = "prewarm"
    created: int
    model: str
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    """The tokens that were found in the cache."""
    disk_tokens: int | UnsetType = UNSET
    """The tokens that were read from disk; left out if nothing is kept there."""
    stored_tokens: int | UnsetType = UNSET
    """The tokens whose blocks are on disk now, of which there are only full ones."""
