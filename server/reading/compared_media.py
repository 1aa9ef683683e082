"""Comparisons of texts with media: by vectors of both, or by a model that reads a query with its document."""

from __future__ import annotations

from collections.abc import Sequence

from server.api.messages import Message
from server.api.pooling_bodies import TextBody
from server.errors import BadRequest
from server.media.parts import MediaPart, find_parts
from server.media.prompt import MediaNeeded, Written, check_places, marked
from server.reading.pooled_conversations import adds_special, item_with_media, read_conversations
from server.reading.prompts import ReadingContext
from server.requests.pooling import Item, PoolingParams, TextReader, find_prompt, prompt_for
from server.requests.scoring import (
    Compared,
    Pairs,
    ScoreOptions,
    Side,
    as_messages,
    check_pairs,
    vector_params,
)


def read_media_pairs(pairs: Pairs, options: ScoreOptions, context: ReadingContext, salt: str) -> Compared:
    """Checks the request, and writes all that is compared as its media need it: texts, too. `salt`: the
    request's cache salt, within which the names of its media are known."""
    facts = context.facts
    check_pairs(pairs, options, facts)
    if options.max_tokens_per_query or options.max_tokens_per_doc:
        raise BadRequest(
            "max_tokens_per_query and max_tokens_per_doc cut texts only, and these have media.", "max_tokens"
        )
    parts = _parts([*pairs.queries, *pairs.documents], context)
    if any(part not in context.media for part in parts):
        raise MediaNeeded(parts, salt, {}, {})
    if facts.score_type == "cross-encoder":
        one = len(pairs.queries) == 1
        both = [(pairs.queries[0 if one else i], document) for i, document in enumerate(pairs.documents)]
        return Compared([], _read_together(both, options, context))
    first, second = options.names
    return Compared(
        _read_apart(pairs.queries, "query", first, options, context),
        _read_apart(pairs.documents, "document", second, options, context),
    )


def _parts(sides: Sequence[Side], context: ReadingContext) -> list[MediaPart]:
    """The media of all sides, each of which is a prompt's."""
    return [part for side in sides for part in find_parts([side], context.facts.media)]


def _read_apart(
    sides: Sequence[Side], kind: str, name: str, options: ScoreOptions, context: ReadingContext
) -> list[Item]:
    """The items of one side, each of which is what a user says, for models that make vectors of it. `kind` is
    the purpose by which an instruction is found, and `name` that of the request's field."""
    conversations = [[Message(role="user", content=side)] for side in sides]
    special, prompt = adds_special(context), prompt_for(kind, context.facts)
    reader = TextReader(context.facts, context.tokenizer, options.truncation, prompt, special, name)
    params = vector_params(context.facts)
    return read_conversations(conversations, TextBody.model_construct(), context, reader, params)


def _read_together(
    pairs: Sequence[tuple[Side, Side]], options: ScoreOptions, context: ReadingContext
) -> list[Item]:
    """One item of each query with its document, as the model's template for scoring writes them."""
    facts, media, tokenizer = context.facts, context.facts.media, context.tokenizer
    if media is None or facts.score_template is None:
        raise BadRequest(
            "This model has no template by which it scores pictures: give texts.", options.names[1]
        )
    params = PoolingParams(task="classify", use_activation=options.use_activation).resolve(facts)
    reader = TextReader(facts, tokenizer, options.truncation, add_special_tokens=False, name="pair")
    instruction = options.instruction or find_prompt(None, facts)
    items: list[Item] = []
    for index, pair in enumerate(pairs):
        messages, kwargs = as_messages(pair, instruction, options.template_kwargs or {})
        parts = _parts(pair, context)
        text = tokenizer.chat.render(
            marked(messages, media, context.media, tokenizer),
            template=facts.score_template,
            kwargs=marked(kwargs, media, context.media, tokenizer),
            written=media.written_parts,
        )
        check_places(text, list(zip(("query", "document"), pair, strict=True)), media)
        items.append(item_with_media(Written(text, parts, is_plain=False), context, reader, params, index))
    return items
