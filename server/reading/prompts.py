"""Turns what a client wrote into the token ids of a prompt: renders, encodes, cuts if asked, checks."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from server.errors import BadRequest, no_chats, refuse_for_sources
from server.media.prompt import (
    MediaNeeded,
    Placed,
    Rows,
    Written,
    check_places,
    cut_prompt,
    encode_marked,
    encode_written,
    joined,
    quoted_words,
    with_row_files,
)
from server.model_facts import MediaFacts
from server.reading.infill import prompts_of
from server.reading.reading_context import ReadingContext
from server.reading.restated_history import as_texts, fit_tool_media, write_restated
from server.reading.row_parts import check_shows_no_tokens, take_row_files, with_rows
from server.reading.system_messages import tell_tools
from server.requests.pooling import CUT_MARGIN
from server.requests.prompt_length import check_prompt_characters, check_prompt_length, kept_tokens
from server.requests.sampling_params import check_logprobs
from server.schemas.body import check_text
from server.schemas.chat import BatchChatRequest, ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.messages import (
    MOST_NAMED,
    ROLES,
    UNENFORCED,
    Message,
    TemplateOptions,
    Tool,
    check_roles,
    held_schema,
)
from server.schemas.sampling_fields import GenerationBody
from server.text.chat_template import AnswerStyle
from server.text.tokenizer import TokenIds, count_ids, unpack

A_LOT = 1 << 40
"""More work than is done in the event loop, in characters."""

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a tool of which the request has none."""

PROMPT_END = 64
"""The characters of a prompt's end by which its answer is read."""


class Prompt(msgspec.Struct, frozen=True, gc=False):
    ids: TokenIds
    text: str | None = None
    """The text as the request has it; None if the prompt came as ids or was cut."""
    media: list[Placed] = []
    rows: list[Rows] = []
    """Embeddings in place of tokens, whose ids are 0."""

    @property
    def length(self) -> int:
        """The number of tokens."""
        return count_ids(self.ids)

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens; none of a prompt with embeddings."""
        return [] if self.rows else unpack(self.ids)


class MessageText(msgspec.Struct, frozen=True, gc=False):
    """A message as an answer repeats it."""

    role: str
    content: str

    def text(self) -> str:
        return self.content


class Conversation(msgspec.Struct, frozen=True, gc=False):
    """The prompt that a chat template wrote, and what else an answer shows of the messages."""

    prompt: Prompt
    last: MessageText
    """The last message. Its content is left out unless the answer shall repeat it."""
    end: str = ""
    """The end of the prompt's text, which may have opened the reasoning."""
    tools: dict[str, dict[str, Any]] = {}
    """The schema of the arguments of each tool of the request."""
    strict_tools: list[str] = []
    """The names of those to whose schema the arguments of a call have to be held."""
    custom_tools: list[str] = []
    """The names of those whose input is free text."""
    warnings: list[str] = []
    """Sentences on what of the request has no effect though it could have."""


def read_completion(body: CompletionRequest, context: ReadingContext) -> list[Prompt]:
    if context.facts.sources is not None:
        refuse_for_sources(
            echo=bool(body.echo),
            prompt_logprobs=body.prompt_logprobs is not None,
            prompt_embeds=bool(body.prompt_embeds),
            use_beam_search=bool(body.use_beam_search),
        )
    special = body.add_special_tokens is not False
    sources = [
        Written(source) if isinstance(source, str) else source
        for source in prompts_of(body, context.tokenizer)
    ]
    embeds = [_prepare_embeds(file, body, context) for file in body.prompt_embeds]
    return embeds + [_prepare(source, body, context, special, body.most_tokens) for source in sources]


def _prepare_embeds(file: str, body: CompletionRequest, context: ReadingContext) -> Prompt:
    """The prompt that a file of embeddings is."""
    from server.media.prompt_embeds import cut_rows, read_rows  # NumPy is imported with the first of them

    check_shows_no_tokens(body, "prompt_embeds")
    rows = read_rows(file, context.facts)
    keep = kept_tokens(body.truncate_prompt_tokens, body.most_tokens, context.facts)
    if keep is not None and keep < len(rows):
        rows = rows[:keep] if body.truncation_side == "right" else rows[len(rows) - keep :]
    check_prompt_length(len(rows), context.facts)
    return Prompt([0] * len(rows), "", rows=cut_rows(rows))


def read_chat(body: ChatRequest, context: ReadingContext) -> Conversation:
    check_logprobs("top_logprobs", "sample", body.top_logprobs, context.facts)
    written = write_chat(body, context)
    prompt = _prepare(written, body, context, body.add_special_tokens, body.most_tokens)
    last = body.messages[-1]
    functions = [tool.function for tool in body.tools or ()]
    told = [tool.function.name for tool in body.tools or () if tool.is_told]
    return Conversation(
        prompt,
        MessageText(last.role, last.text() if body.echo else ""),
        end=written.plain_text[-PROMPT_END:],
        tools={tool.function.name: _arguments(tool) for tool in body.tools or ()},
        strict_tools=[each.name for each in functions if each.strict],
        custom_tools=[tool.function.name for tool in body.tools or () if tool.is_custom],
        warnings=[
            *body.repairs,
            *written.notes,
            *([f"{UNENFORCED}: {', '.join(told[:MOST_NAMED])}"] if told else []),
        ],
    )


def read_batch(body: BatchChatRequest, context: ReadingContext) -> list[Conversation]:
    found, needed = list[Conversation](), list[MediaNeeded]()
    for each in body.conversations:
        try:
            found.append(read_chat(body.model_copy(update={"messages": each}), context))
        except MediaNeeded as media:
            needed.append(media)
    if needed:
        raise joined(needed)
    return found


def read_raw(text: str, body: ChatRequest, context: ReadingContext) -> Conversation:
    """A prompt that no template has written, to be answered like a conversation."""
    check_logprobs("top_logprobs", "sample", body.top_logprobs, context.facts)
    prompt = _prepare(Written(text), body, context, True, body.most_tokens)
    return Conversation(prompt, MessageText("user", ""), end=text[-PROMPT_END:])


def _arguments(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    parameters = tool.function.parameters
    return NO_ARGUMENTS if parameters is None else held_schema(parameters, tool.held_to)


def write_chat(body: ChatRequest, context: ReadingContext) -> Written:
    """The text of a chat's prompt."""
    tools = body.tools or []
    calls = [None for message in body.messages if message.tool_calls or message.role in ("tool", "function")]
    if not (tools or calls or body.tool_choice):
        return write_answered(body, body.messages, context, body.style)
    choice = body.choice
    choice.check([tool.function.name for tool in tools])
    if not (tools or calls) or not body.may_be_told or not context.knows_no_calls:
        return write_answered(body, body.messages, context, body.style)
    messages, notes = fit_tool_media(body.messages, context.facts.media, context.unread)
    if calls:
        context.need_media([take_row_files(messages)[0]], body)  # while roles tell what is of tools
        messages = as_texts(messages, marked=True)
    if allowed := [tool for tool in tools if choice.allows(tool.function.name)]:
        several, must = body.several_calls, choice.mode == "required"
        messages = tell_tools(messages, allowed, context.tokenizer.chat, must=must, several=several)
    written = write_answered(body.model_copy(update={"tools": None}), messages, context, body.style)
    return msgspec.structs.replace(written, notes=notes + written.notes) if notes else written


def write_answered(
    options: TemplateOptions,
    messages: list[Message],
    context: ReadingContext,
    style: AnswerStyle | None = None,
) -> Written:
    """Renders a conversation of which parts may be embeddings in place of tokens."""
    if not [None for message in messages if message.role != "user" or type(message.content) is list]:
        return write_conversation(options, messages, context, style)  # no history, and no files
    messages, files = take_row_files(messages)
    write = partial(write_conversation, options, context=context, style=style)
    written = write_restated(messages, context.tokenizer.chat, context.facts.media, write, context.unread)
    return with_row_files(written, files) if files else written


def work_of_template(body: TemplateOptions, context: ReadingContext) -> int:
    """A template that the request brings is a stranger's program, which may run for ever."""
    return A_LOT if body.chat_template is not None and context.options.trust_request_chat_template else 0


def _prepare(
    source: Written | list[int],
    body: GenerationBody,
    context: ReadingContext,
    special: bool,
    max_tokens: int | None,
) -> Prompt:
    if isinstance(source, Written) and source.row_files:
        check_shows_no_tokens(body, "messages")
    keep = kept_tokens(body.truncate_prompt_tokens, max_tokens, context.facts)
    return prepare_prompt(source, context, keep, left=body.truncation_side != "right", special=special)


def prepare_prompt(
    source: Written | list[int],
    context: ReadingContext,
    keep: int | None = None,
    *,
    left: bool = True,
    special: bool = True,
) -> Prompt:
    """Encodes and checks a prompt, of which `keep` tokens are left at most: the last ones if `left`.

    `special` adds the tokenizer's own tokens, which stay where a text is cut."""
    facts, text = context.facts, None
    placed: list[Placed] = []
    if isinstance(source, Written):
        if source.is_plain:
            text = source.plain_text
            if keep is not None and text == source.text:  # more text would be cut after encoding anyway
                size = (keep + CUT_MARGIN) * context.tokenizer.longest_token
                text = text[max(0, len(text) - size) :] if left else text[:size]
                source = Written(text)
        ids, placed = encode_conversation(source, context, add_special_tokens=special, bounded=keep is None)
    else:
        ids = source
    rows: list[Rows] = []
    if isinstance(source, Written) and source.row_files:
        ids, placed, rows = with_rows(ids, placed, source.row_files, facts, keep, left=left)
    if keep is not None and len(ids) > keep:
        text = None
        if isinstance(source, Written) and source.is_plain:  # what begins and ends a text stays
            [ids] = context.tokenizer.encode_many([source.text], special, keep, left=left)
        else:
            ids, placed = cut_prompt(ids, placed, keep, left=left)
    check_prompt_length(len(ids), facts)
    facts.check_token_ids(ids, "prompt")
    return Prompt(ids, text, placed, rows)


def encode_conversation(
    written: Written, context: ReadingContext, *, add_special_tokens: bool, bounded: bool = True
) -> tuple[list[int], list[Placed]]:
    """Encodes the text of a prompt, which may have media. `bounded` refuses one that is too long for the
    model whatever its tokens are."""
    check_text(written.text)
    if bounded:
        check_prompt_characters(written.plain_text, context.facts, context.tokenizer)
    special, media = add_special_tokens, context.facts.media
    if written.is_plain:
        return context.tokenizer.encode(written.text, special), []
    if media is None:
        return encode_marked(written.text, context.tokenizer, special), []
    size, tokenizer = context.facts.vocab_size, context.tokenizer
    return encode_written(written, context.media, media, tokenizer, size, add_special_tokens=special)


def write_conversation(
    options: TemplateOptions,
    messages: list[Message],
    context: ReadingContext,
    style: AnswerStyle | None = None,
) -> Written:
    """Renders the conversation as the text that the model was trained on."""
    if context.facts.sources is not None:
        raise no_chats()
    if options.chat_template is not None and not context.options.trust_request_chat_template:
        raise BadRequest(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template.",
            "chat_template",
        )
    media = context.facts.media
    with_parts = [message for message in messages if type(message.content) is list]
    parts = context.need_media([messages], options) if with_parts else []
    if media is None or not parts:
        text = _rendered(options, messages, context, style)
        if media is None or not any(word in text for word in media.reserved):
            return Written(text)
    text = _rendered(options, messages, context, style, media)
    check_places(text, [(message.role, message.content) for message in messages], media)
    return Written(text, parts, is_plain=False)


def _rendered(
    options: TemplateOptions,
    messages: list[Message],
    context: ReadingContext,
    style: AnswerStyle | None,
    media: MediaFacts | None = None,
) -> str:
    """The text that the template writes, with marks in what users quote. `media` is that of the model if the
    text has to do with it."""
    chat, tools = context.tokenizer.chat, options.tools
    others = [number for number, message in enumerate(messages) if message.role not in ROLES]
    asked: dict[str, object] = {}
    if others or style is not None:
        compiled = chat.compiled(options.chat_template, with_tools=tools is not None)
        check_roles(messages, others, compiled.words)
        asked = style.variables(compiled.variables) if style is not None else asked
    return chat.render(
        [message.for_template() for message in messages],
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        tools=None if tools is None else [tool.for_template() for tool in tools],
        documents=options.documents,
        template=options.chat_template,
        kwargs=options.chat_template_kwargs,
        defaults={**context.options.default_chat_template_kwargs, **asked},
        content_format=context.options.content_format,
        written=None if media is None else media.written_parts,
        quoted=frozenset() if media is None else quoted_words(media, context.media, context.tokenizer),
    )
