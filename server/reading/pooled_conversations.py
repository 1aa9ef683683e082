"""Conversations that are pooled, and their media, of which some models take each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from server.api.messages import Message, TemplateOptions
from server.errors import BadRequest
from server.media.prompt import Placed, Written, cut_prompt
from server.reading.prompts import ReadingContext, encode_conversation, need_media, write_conversation
from server.requests.pooling import Item, TextReader, find_prompt
from worker.protocol import Pooling


def read_conversations(
    conversations: Sequence[list[Message]],
    options: TemplateOptions,
    context: ReadingContext,
    reader: TextReader,
    params: Pooling,
) -> list[Item]:
    """The item of each conversation. Their texts without media are tokenized together."""
    need_media(conversations, options, context)
    written = [_written(messages, options, context) for messages in conversations]
    if takes_alone(context):
        reader = replace(reader, prompt=find_prompt(None, context.facts))
    texts = iter(reader.read_all([one.text for one in written if one.is_plain], params))
    return [
        next(texts) if one.is_plain else item_with_media(one, context, reader, params, index)
        for index, one in enumerate(written)
    ]


def takes_alone(context: ReadingContext) -> bool:
    """Whether a picture is a prompt of its own, for which no template has a place."""
    media = context.facts.media
    return media is not None and media.alone


def _written(messages: list[Message], options: TemplateOptions, context: ReadingContext) -> Written:
    media = context.facts.media
    if media is None or not media.alone:
        return write_conversation(options, messages, context)
    parts = need_media([messages], options, context)
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
) -> Item:
    keep, left = reader.truncation.keep, reader.truncation.left
    if not written.text:
        laid = context.media[written.parts[0]]
        ids = list(laid.layout.tokens)
        placed = [Placed(laid.hash, 0, len(ids), laid.layout.embeddings)]
    else:
        special = reader.add_special_tokens
        ids, placed = encode_conversation(written, context, add_special_tokens=special, bounded=keep is None)
    if keep is not None and len(ids) > keep:
        ids, placed = cut_prompt(ids, placed, keep, left=left)
    context.facts.check_text(ids, reader.name, index)
    return Item(ids, params, placed)
