"""Reads questions about a text: each is written behind it by the chat template, so that all prompts begin
with the same tokens, which are computed once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from server.errors import BadRequest
from server.media.prompt import Written
from server.model_facts import DECIDE
from server.output_parsing.format_detection import find_format
from server.output_parsing.tool_call_dialects import NONE
from server.reading.decision_rows import HeadRows
from server.reading.prompts import PROMPT_END, Prompt, encode_conversation, write_chat
from server.reading.reading_context import ReadingContext
from server.requests.decisions import (
    INTRODUCTION,
    MOST_BRANCHES,
    MOST_BRANCHES_TOGETHER,
    Labels,
    Question,
    forms,
    orders_of,
    wordings,
)
from server.schemas.chat import ChatRequest
from server.schemas.conversations.transcript import chat_request
from server.schemas.decisions.question_forms import DecidingBody

_PLACE = f"d{secrets.token_hex(12)}w"
"""What stands for a question while the template writes the conversation. Nobody can write it who does not
know it: it is another one in each process."""


class AskedQuestion(msgspec.Struct, frozen=True, gc=False):
    """A question in one order of its options, as it stands behind the state."""

    question: int
    """Its index among the questions of the request."""
    tokens: list[int]
    labels: list[list[int]]
    """The tokens of the label of each option, in the question's order; for a head its place among them."""


class ReadDecisions(msgspec.Struct, frozen=True, gc=False):
    """The questions of a request, and what an engine reads of them."""

    questions: list[Question]
    state: Prompt
    """The beginning of all prompts."""
    asked: list[AskedQuestion]
    refusals: dict[int, str]
    """Why questions cannot be asked, by their index."""


def read_decisions(body: DecidingBody, context: ReadingContext) -> ReadDecisions:
    """Raises the error that refuses the request if nothing of it can be asked."""
    questions, asked = body.asked, list[AskedQuestion]()
    if DECIDE in context.facts.tasks:
        rows = HeadRows(context.tokenizer)
        state = Prompt(rows.state(body.messages, body.state_field))
        for index, question in enumerate(questions):
            for order in orders_of(question, context.options.decide_orders, no_first=True):
                labels = [[order.index(at)] for at in range(len(order))]
                asked.append(AskedQuestion(index, rows.question(question, order), labels))
    else:
        before, behind = _written(body, context)
        ids, placed = encode_conversation(before, context, add_special_tokens=False)
        state = Prompt(ids, media=placed)
        for index, question in enumerate(questions):
            asked += _asked(index, question, behind, context.facts.max_model_len - len(ids), context)
    refusals = _refusals(body.state_field, state, questions, asked, context)
    return ReadDecisions(questions, state, [one for one in asked if one.question not in refusals], refusals)


def _asked(
    index: int, question: Question, behind: str, room: int, context: ReadingContext
) -> list[AskedQuestion]:
    """A question in each order of its options, of which as much is shown as there is room for."""
    found: list[AskedQuestion] = []
    for shown in forms(question):
        found = [
            AskedQuestion(
                index,
                context.tokenizer.encode_behind(_divided(wording.text, context) + behind),
                context.tokenizer.encode_many([_divided(each, context) for each in wording.labels], False),
            )
            for wording in wordings(question, context.options.decide_orders, shown)
        ]
        if max(map(_most_tokens, found)) < room:
            break
    return found


def _most_tokens(asked: AskedQuestion) -> int:
    """The most tokens behind the state of the prompts of a question."""
    return len(asked.tokens) + max(map(len, asked.labels))


def work_of_decisions(body: DecidingBody, context: ReadingContext) -> int:
    """The characters that are tokenized of questions, which are asked twice where their options have two
    orders."""
    return sum(len(wording.text) for question in body.asked for wording in wordings(question))


def _written(body: DecidingBody, context: ReadingContext) -> tuple[Written, str]:
    """The text of the conversation up to where a question stands, and what follows that."""
    written = write_chat(_with_place(body.messages), context)
    text, found, behind = written.text.rpartition(_PLACE)
    if not found:
        raise BadRequest(
            "The model's chat template does not write a question behind this conversation.", body.state_field
        )
    format = find_format(context.tokenizer, NONE)
    if format.thinking is not None and format.begins_thinking(written.plain_text[-PROMPT_END:]):
        behind += f"\n{format.as_written(format.thinking.closes[0])}\n\n"
    return msgspec.structs.replace(written, text=text), behind


def _with_place(messages: Sequence[dict[str, Any]]) -> ChatRequest:
    """The conversation with a place for a question at its end, in the user's words."""
    *before, last = messages
    place = f"{INTRODUCTION}{_PLACE}"
    if last["role"] != "user":
        said = [*messages, {"role": "user", "content": place}]
    elif isinstance(last["content"], str):
        said = [*before, {**last, "content": f"{last['content']}\n\n{place}"}]
    else:
        said = [*before, {**last, "content": [*last["content"], {"type": "text", "text": f"\n\n{place}"}]}]
    return chat_request({"messages": said, "enable_thinking": False})


def _divided(text: str, context: ReadingContext) -> str:
    """The text with marks in control tokens that the client has written."""
    divider = context.tokenizer.chat.divider
    return text if divider is None else divider.divide(text)


def _refusals(
    field: str,
    state: Prompt,
    questions: Sequence[Question],
    asked: Sequence[AskedQuestion],
    context: ReadingContext,
) -> dict[int, str]:
    """Why questions cannot be asked. Raises BadRequest if the state leaves no room for any."""
    most, ends = context.facts.max_model_len, context.facts.eos_token_ids
    shortest = min(len(one.tokens) for one in asked)
    excess = state.length + shortest + 1 - most
    if excess > 0:
        raise BadRequest(
            f"`{field}` has {state.length} tokens, which is {excess} more than fit: this model reads {most}, "
            f"and the shortest of the questions takes {shortest} of them. Shorten it.",
            field,
        )
    found: dict[int, str] = {}
    together = 0
    for one in asked:
        excess = state.length + _most_tokens(one) + 1 - most
        if excess > 0:
            found[one.question] = (
                f"it has {excess} tokens more than fit behind the {state.length} of `{field}`"
            )
            continue
        count = len(Labels(one.labels, ends).branches)
        if count > MOST_BRANCHES:
            found[one.question] = (
                f"its options are told apart at more than {MOST_BRANCHES} places: give shorter ones, or fewer"
            )
        elif (together := together + count) > MOST_BRANCHES_TOGETHER:
            found[one.question] = (
                "its options and those of the questions before it are told apart at more than "
                f"{MOST_BRANCHES_TOGETHER} places: ask it in another request"
            )
    if len(found) == len(questions):
        index, reason = next(iter(found.items()))
        raise BadRequest(f"Question {questions[index].name or index}: {reason}.", "questions")
    return found
