"""The vector or the score of an answer, from what lies in the cache of it and one position more.

The prompt and the answer, its last token included, are pooled as a text of so many tokens would be, under the
same salt: all but the last block is found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
from msgspec import UNSET

from engine_core.client.in_flight import AddOptions
from engine_core.protocol import Pooled
from server.access.admission import Admission
from server.api.shared_fields import ChunkChoice
from server.errors import BadRequest
from server.frontend.frontend import Frontend
from server.media.kept_items import Item as MediaItem
from server.model_facts import Facts
from server.reading.prompts import Prompt
from server.requests.pooling import Item, PoolingParams
from server.requests.spaces import find_space
from server.requests.vectors import as_json, scalar
from worker.protocol import Pooling, Vectors

_FOR_TEXTS = ("priority", "salt", "owner", "weight", "max_running")
"""The options of an answer that are those of its vector, too."""


def pooled_parts(include: Sequence[str], prompts: Sequence[Prompt], facts: Facts) -> dict[str, Pooling]:
    """How the parts of an answer are pooled that a request wants. Raises an error if one cannot be."""
    wanted: dict[str, Pooling] = {}
    if "embedding" in include:
        wanted["embedding"] = PoolingParams(task="embed").resolve(facts)
    if "score" in include:
        wanted["score"] = PoolingParams(task="classify").resolve(facts)
        if facts.pooling.num_labels != 1:
            labels = facts.pooling.num_labels
            raise BadRequest(f"A score has one number, and this model gives {labels} labels.", "include")
    if wanted and any(prompt.rows for prompt in prompts):
        raise BadRequest("The vector of an answer needs a prompt of tokens, not of embeddings.", "include")
    return wanted


async def pool_answer(
    frontend: Frontend,
    prompt: Prompt,
    output: Sequence[int],
    wanted: Mapping[str, Pooling],
    admission: Admission,
    options: AddOptions,
    replica: int | None,
    media: Mapping[bytes, MediaItem],
) -> dict[str, Pooled]:
    """The parts that are wanted, of an answer that has these tokens."""
    tokens = [*prompt.tokens, *output]
    items = [Item(tokens, params, prompt.media) for params in wanted.values()]
    told = cast(AddOptions, {name: value for name, value in options.items() if name in _FOR_TEXTS})
    found = await frontend.pool(items, admission=admission, replica=replica, media_items=media, **told)
    return dict(zip(wanted, found, strict=True))


def add_parts(
    chunk: ChunkChoice, pooled: Mapping[str, Vectors], wanted: Mapping[str, Pooling], facts: Facts
) -> None:
    """Writes what was pooled into the last chunk of an answer."""
    if "embedding" in pooled:
        chunk.embedding = msgspec.Raw(as_json(pooled["embedding"]))
        if (space := find_space(facts, wanted["embedding"], "ids")) is not None:
            chunk.embedding_space = str(space)
    chunk.score = scalar(pooled["score"]) if "score" in pooled else UNSET
