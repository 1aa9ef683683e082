"""Conversations that are pooled, and comparisons of texts with media. Models compare vectors of both sides,
or read a query with its document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from models.pooling.text_files import ChatForm
from server.errors import BadRequest
from server.media.media_parts import MediaPart, find_parts
from server.media.prompt import MediaNeeded, Placed, Written, check_places, cut_prompt, quoted_words
from server.reading.prompts import encode_conversation, write_conversation
from server.reading.reading_context import ReadingContext
from server.requests.pooling import PooledText, PoolingParams, TextReader, find_prompt, prompt_for
from server.requests.prompt_length import check_text_tokens
from server.requests.scoring import (
    Compared,
    Pairs,
    ScoreOptions,
    Side,
    ahead_of_pair_end,
    as_messages,
    check_pairs,
    vector_params,
    with_pair_end,
)
from server.schemas.messages import Message, TemplateOptions
from server.schemas.pooling_bodies import TextBody
from server.text.tokenizer import Tokenizer
from worker.protocol import Pooling


def read_conversations(
    conversations: Sequence[list[Message]],
    options: TemplateOptions,
    context: ReadingContext,
    reader: TextReader,
    params: Pooling,
) -> list[PooledText]:
    """The item of each conversation. Their texts without media are tokenized together. The instruction of
    `reader` is for models with a form for it."""
    chat, instruction = context.facts.pooling.texts.chat, reader.prompt
    if not takes_alone(context):
        reader = replace(reader, prompt="", is_written=True)
        if chat is not None:
            options = _with_form(options, chat)
            conversations = [_with_instruction(messages, instruction) for messages in conversations]
    context.need_media(conversations, options)
    written = [_written(messages, options, context) for messages in conversations]
    if reader.truncation.keep is None or takes_alone(context) or not (chat is None or chat.keeps_ending):
        texts = iter(reader.read_all([one.text for one in written if one.is_plain], params))
    else:
        texts = (
            replace(reader, write=partial(_saying, each, options, context)).read([one.text], params, index)[0]
            for index, (each, one) in enumerate(zip(conversations, written, strict=True))
            if one.is_plain
        )
    return [
        next(texts) if one.is_plain else item_with_media(one, context, reader, params, index)
        for index, one in enumerate(written)
    ]


def _saying(messages: list[Message], options: TemplateOptions, context: ReadingContext, text: str) -> str:
    """The conversation with this text in place of what is said, from which the template's end is seen."""
    said = [message.model_copy(update={"content": text}) for message in messages]
    return write_conversation(options, said, context).text


def takes_alone(context: ReadingContext) -> bool:
    """Whether a picture is a prompt of its own, for which no template has a place."""
    media = context.facts.media
    return media is not None and media.alone


def adds_special(context: ReadingContext) -> bool:
    """Whether the tokenizer's own tokens come with conversations, if a request does not say."""
    chat = context.facts.pooling.texts.chat
    return takes_alone(context) or (chat is not None and chat.add_special_tokens)


def _with_form(options: TemplateOptions, chat: ChatForm) -> TemplateOptions:
    """What the request does not say of a template is as in training."""
    changes: dict[str, object] = {
        "chat_template_kwargs": {**chat.kwargs, **(options.chat_template_kwargs or {})}
    }
    if "add_generation_prompt" not in options.model_fields_set:
        changes["add_generation_prompt"] = chat.add_generation_prompt
    return options.model_copy(update=changes)


def _with_instruction(messages: list[Message], instruction: str) -> list[Message]:
    if not instruction or messages[0].role == "system":
        return messages
    return [Message(role="system", content=instruction), *messages]


def _written(messages: list[Message], options: TemplateOptions, context: ReadingContext) -> Written:
    media = context.facts.media
    if media is None or not media.alone:
        return write_conversation(options, messages, context)
    parts = context.need_media([messages], options)
    texts = [message.text() for message in messages if message.text()]
    if not parts:
        return Written("\n".join(texts))
    if texts or len(parts) > 1:
        raise BadRequest(
            "This model has a vector for a text or for a picture: give each in an input of its own.",
            "messages",
        )
    return Written(media.written, parts, is_plain=False)


def item_with_media(
    written: Written, context: ReadingContext, reader: TextReader, params: Pooling, index: int
) -> PooledText:
    keep, left = reader.truncation.keep, reader.truncation.left
    if not written.text:
        laid = context.media[written.parts[0]]
        ids = list(laid.layout.tokens)
        placed = [Placed(laid.hash, 0, len(ids), laid.layout.embeddings)]
    else:
        special = reader.adds_special_to(written.text)
        ids, placed = encode_conversation(written, context, add_special_tokens=special, bounded=keep is None)
    if keep is not None and len(ids) > keep:
        ids, placed = cut_prompt(ids, placed, keep, left=left)
    check_text_tokens(ids, reader.name, index, context.facts)
    return PooledText(ids, params, placed)


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
    if facts.score_type == "cross-encoder" and options.weights is None:
        one = len(pairs.queries) == 1
        both = [(pairs.queries[0 if one else i], document) for i, document in enumerate(pairs.documents)]
        return Compared([], _read_together(both, options, context))
    first, second = options.names
    return Compared(
        _read_apart(pairs.queries, "query", first, options, context),
        _read_apart(pairs.documents, "document", second, options, context),
        weights=options.weights,
    )


def _parts(sides: Sequence[Side], context: ReadingContext) -> list[MediaPart]:
    """The media of all sides, each of which is a prompt's."""
    return [part for side in sides for part in find_parts([side], context.facts.media)]


def _read_apart(
    sides: Sequence[Side], kind: str, name: str, options: ScoreOptions, context: ReadingContext
) -> list[PooledText]:
    """The items of one side, each of which is what a user says, for models that make vectors of it. `kind` is
    the purpose by which an instruction is found, and `name` that of the request's field."""
    conversations = [[Message(role="user", content=side)] for side in sides]
    special, prompt = adds_special(context), prompt_for(kind, context.facts)
    reader = TextReader(context.facts, context.tokenizer, options.truncation, prompt, special, name)
    params = vector_params(context.facts, options, query=kind == "query")
    return read_conversations(conversations, TextBody.model_construct(), context, reader, params)


def _read_together(
    pairs: Sequence[tuple[Side, Side]], options: ScoreOptions, context: ReadingContext
) -> list[PooledText]:
    """One item of each query with its document, as the model's template for scoring writes them."""
    facts, media, tokenizer = context.facts, context.facts.media, context.tokenizer
    if media is None or facts.score_template is None:
        raise BadRequest(
            "This model has no template by which it scores pictures: give texts.", options.names[1]
        )
    params = PoolingParams(task="classify", use_activation=options.use_activation).resolve(facts)
    truncation = ahead_of_pair_end(options.truncation, facts)
    reader = TextReader(facts, tokenizer, truncation, add_special_tokens=False, name="pair")
    instruction = options.instruction or find_prompt(None, facts)
    documents_first = _writes_documents_first(facts.score_template, tokenizer)
    items: list[PooledText] = []
    for index, pair in enumerate(pairs):
        messages, kwargs = as_messages(pair, instruction, options.template_kwargs or {})
        sides = list(zip(("query", "document"), pair, strict=True))
        if documents_first:
            sides.reverse()
        parts = _parts([side for _, side in sides], context)
        text = tokenizer.chat.render(
            messages,
            template=facts.score_template,
            kwargs=kwargs,
            written=media.written_parts,
            quoted=quoted_words(media, context.media, tokenizer),
        )
        check_places(text, sides, media)
        items.append(item_with_media(Written(text, parts, is_plain=False), context, reader, params, index))
    return with_pair_end(items, facts)


def _writes_documents_first(template: str, tokenizer: Tokenizer) -> bool:
    messages, _ = as_messages(("-query-", "-document-"), "", {})
    text = tokenizer.chat.render(messages, template=template)
    return text.find("-document-") < text.find("-query-")
