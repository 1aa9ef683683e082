"""Turns what a client wrote into the token ids of a prompt: renders, encodes, cuts if asked, checks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from server.api.common import GenerationBody
from server.api.fields import check_text
from server.api.messages import Message, TemplateOptions
from server.errors import BadRequest, invalid
from server.frontend import Frontend
from server.options.table import ServerConfig
from server.requests.facts import Facts
from server.requests.pooling import CUT_MARGIN
from server.text.tokenizer import LONG_TEXT

MANY_MESSAGES = 64
"""A conversation of so many messages, or of LONG_TEXT characters, is rendered in a thread."""

Sliceable = TypeVar("Sliceable", str, list[int])


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str | None
    """The text as the request has it; None if the prompt came as ids or was cut."""
    cut_left: bool = False
    """Whether truncation has cut the beginning off."""


async def prepare(
    source: str | list[int],
    body: GenerationBody,
    frontend: Frontend,
    *,
    add_special_tokens: bool,
    max_tokens: int | None,
) -> Prompt:
    facts = frontend.facts
    keep = _kept_tokens(body, facts, max_tokens)
    left = body.truncation_side != "right"
    if isinstance(source, str):
        text = source
        if keep is not None:
            # Text beyond this would be cut after encoding anyway.
            text = _cut(text, (keep + CUT_MARGIN) * frontend.tokenizer.longest_token, left=left)
        ids = await encode(text, frontend, add_special_tokens=add_special_tokens, bounded=keep is None)
    else:
        text, ids = None, source
    cut = keep is not None and len(ids) > keep
    if keep is not None and cut:
        text, ids = None, _cut(ids, keep, left=left)
    facts.check_prompt_length(len(ids))
    facts.check_token_ids(ids, "prompt")
    return Prompt(ids, text, cut and left)


async def encode(
    text: str, frontend: Frontend, *, add_special_tokens: bool, bounded: bool = True
) -> list[int]:
    """Encodes a text. `bounded` refuses one that is too long for the model whatever its tokens are."""
    check_text(text)
    if bounded:
        frontend.tokenizer.check_text_length(text, frontend.facts)
    return await frontend.tokenizer.encode_async(text, add_special_tokens)


async def write_conversation(
    options: TemplateOptions,
    messages: list[Message],
    frontend: Frontend,
    config: ServerConfig,
    reasoning_effort: str | None = None,
) -> str:
    """Renders the conversation as the text that the model was trained on."""
    asked = options.chat_template_kwargs or {}
    if options.chat_template is not None and not config.trust_request_chat_template:
        raise BadRequest(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template.",
            "chat_template",
        )
    effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    written = [message.for_template() for message in messages]

    def render() -> str:
        return frontend.tokenizer.chat.render(
            written,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=None if options.tools is None else [tool.for_template() for tool in options.tools],
            documents=options.documents,
            template=options.chat_template,
            kwargs={**config.default_chat_template_kwargs, **effort, **asked},
        )

    short = len(messages) < MANY_MESSAGES and sum(len(message.text()) for message in messages) < LONG_TEXT
    # A template that comes with the request may take long.
    return render() if short and options.chat_template is None else await asyncio.to_thread(render)


def _kept_tokens(body: GenerationBody, facts: Facts, max_tokens: int | None) -> int | None:
    """How many tokens of the prompt to keep; None keeps all."""
    asked = body.truncate_prompt_tokens
    if asked is not None and asked > facts.max_model_len:
        raise invalid(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens={asked} cannot be greater than max_model_len = {facts.max_model_len}. "
            "Please request a smaller truncation size.",
            asked,
        )
    if asked == -1:
        return max(1, facts.max_model_len - max(1, max_tokens or 1))
    return asked


def _cut(whole: Sliceable, size: int, *, left: bool) -> Sliceable:
    return whole[max(0, len(whole) - size) :] if left else whole[:size]
