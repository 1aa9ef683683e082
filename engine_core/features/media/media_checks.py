"""Checks the media and sources of requests, and refuses them where a model reads text alone."""

from __future__ import annotations

from math import prod

from engine_core.config import EngineConfig
from engine_core.prompt_media import Media
from engine_core.protocol import AddRequest
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.request_checks import all_within
from worker.protocol import Pooling, Sampling
from worker.worker_facts import WorkerFacts

_MOST_TIME = 1 << 24
"""The most positions on the axis of time that an item may take, which float32 still tells apart."""


class TextAlone(Feature):
    """Refuses media and sources for a model that does not read them."""

    asked_by = "media", "source"

    def __init__(self, *, takes_media: bool, takes_sources: bool) -> None:
        self._takes_media, self._takes_sources = takes_media, takes_sources

    def refuse(self, add: AddRequest) -> str | None:
        if add.media and not self._takes_media:
            return "this model is served for text only: send no media"
        if add.source is not None and not self._takes_sources:
            return "this model reads no source: send none"
        return None


def cuts_no_item(config: EngineConfig, facts: WorkerFacts) -> bool:
    """Whether all tokens of an item are computed in one step."""
    return facts.whole_media or config.disable_chunked_mm_input


def bad_media(add: AddRequest, config: EngineConfig, facts: WorkerFacts) -> str | None:
    """Say why the media of a request cannot be computed."""
    count, end = add.prompt_len or len(add.tokens), 0
    for media in add.media:
        if media.length < 1 or not end <= media.at <= media.end <= count:
            return f"media must lie within the prompt's {count} tokens, in order, and must not overlap"
        end = media.end
        if reason := _bad_item(media, facts):
            return reason
        if cuts_no_item(config, facts) and media.length > facts.max_num_batched_tokens:
            return (
                f"an item takes {media.length} tokens of the prompt, which one step must compute: set "
                f"--max-num-batched-tokens (now {facts.max_num_batched_tokens}) to as many at least"
            )
    if any(media.kind == "rows" for media in add.media) and (
        isinstance(add.params, Pooling) or add.params.prompt_logprobs is not None
    ):
        return "a prompt with embeddings is answered, and these have no tokens that could have logprobs"
    if not (config.enable_chunked_prefill and facts.cuts_prompts):
        embeddings = sum({media.hash: media.embeddings for media in add.media}.values())
        if embeddings > facts.most_embeddings:
            return (
                f"the media have {embeddings} embeddings, and one step, which must compute the whole prompt, "
                f"holds {facts.most_embeddings}: send fewer or smaller ones"
            )
    return None


def _bad_item(media: Media, facts: WorkerFacts) -> str | None:
    width = {"rows": facts.row_width, "encoded": facts.media_width}.get(media.kind)
    if width is not None and media.shape != (media.embeddings, width, 4):
        allowed = f"{width} numbers each" if width else "allowed by --enable-prompt-embeds"
        return f"embeddings of a prompt must be {allowed}"
    end = 0
    for first, length in media.runs:
        if length < 1 or not end <= first <= first + length <= media.length:
            return f"the embeddings of an item must lie within its {media.length} tokens, in order"
        end = first + length
    if not 1 <= media.embeddings <= facts.most_embeddings:
        return (
            f"an item has {media.embeddings} embeddings, and must have from 1 to {facts.most_embeddings}: "
            "send a smaller one"
        )
    if min(*media.shape, *media.grid) < 1 or not prod(media.grid) <= prod(media.shape) == len(media.pixels):
        return f"an item's shape {media.shape}, grid {media.grid} and {len(media.pixels)} bytes do not fit"
    if not 0 < media.interval * media.grid[0] < _MOST_TIME:
        return f"the frames of an item cannot lie {media.interval} apart"
    return None


def bad_source(add: AddRequest, facts: WorkerFacts, vocab_size: int) -> str | None:
    """Say why what the encoder shall read for a request cannot be read."""
    source, most = add.source, facts.source_len
    if source is None:
        return f"this model reads a source of {facts.source_kind}: send one"
    if isinstance(add.params, Sampling) and add.params.prompt_logprobs is not None:
        return "an answer to a source has no logprobs of a prompt"
    if not 1 <= source.length <= most:
        return f"the source has {source.length} positions, and must have from 1 to {most}: shorten it"
    if facts.source_kind == "audio":
        values = prod(facts.source_shape)
        if source.tokens or source.features is None or len(source.features) not in (2 * values, 4 * values):
            return f"this model reads features {list(facts.source_shape)}, float16 or float32, and no tokens"
        return None
    if source.features is not None or len(source.tokens) != source.length:
        return f"this model reads tokens, as many as the {source.length} positions of the source"
    if not all_within(source.tokens, vocab_size):
        return f"the source has token ids outside of the vocabulary, which is 0 to {vocab_size - 1}"
    return None
