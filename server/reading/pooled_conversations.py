"""Conversations that are pooled, and their media, of which some models take each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from models.pooling.sentence_files import ChatForm
from server.api.messages import Message, TemplateOptions
from server.errors import BadRequest
from server.media.prompt import Placed, Written, cut_prompt
from server.reading.prompts import ReadingContext, encode_conversation, need_media, write_conversation
from server.requests.pooling import Item, TextReader
from worker.protocol import Pooling


def read_conversations(
    conversations: Sequence[list[Message]],
    options: TemplateOptions,
    context: ReadingContext,
    reader: TextReader,
    params: Pooling,
) -> list[Item]:
    """The item of each conversation. Their texts without media are tokenized together. The instruction of
    `reader` is for models with a form for it."""
    chat, instruction = context.facts.pooling.texts.chat, reader.prompt
    if not takes_alone(context):
        reader = replace(reader, prompt="", is_written=True)
        if chat is not None:
            options = _with_form(options, chat)
            conversations = [_with_instruction(messages, instruction) for messages in conversations]
    need_media(conversations, options, context)
    written = [_written(messages, options, context) for messages in conversations]
    texts = iter(reader.read_all([one.text for one in written if one.is_plain], params))
    return [
        next(texts) if one.is_plain else item_with_media(one, context, reader, params, index)
        for index, one in enumerate(written)
    ]


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
        special = reader.adds_special_to(written.text)
        ids, placed = encode_conversation(written, context, add_special_tokens=special, bounded=keep is None)
    if keep is not None and len(ids) > keep:
        ids, placed = cut_prompt(ids, placed, keep, left=left)
    context.facts.check_text(ids, reader.name, index)
    return Item(ids, params, placed)
