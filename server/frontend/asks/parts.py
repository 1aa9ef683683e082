"""What writers of answers get: a head that never changes, and parts as they come.

A writer needs nothing else. It knows neither the HTTP request nor the frontend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from engine_core.client.in_flight import AddOptions
from server.access.admission import Admission
from server.access.client_identity import TimeLimits
from server.access.request_state import RequestState
from server.frontend.frontend import Frontend
from server.frontend.text_output import Delta
from server.model_facts import Facts
from server.output_parsing.unread_text import AnswerPart
from server.reading.prompts import Conversation, Prompt
from server.requests.speculation_reports import AnswerMetrics
from server.requests.timing import RequestTimes
from server.schemas.logprobs import TokenNames
from server.schemas.sampling_fields import Usage, make_usage


class Terms(msgspec.Struct, frozen=True):
    """How a request is run, whatever it asks for."""

    state: RequestState
    """What is known of the request: its client, its times, its media, and the places that it has."""
    id: str
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    replica: int | None = None
    """The only replica that may run the request; None for any."""
    priority: int = 0
    salt: str = ""
    limits: TimeLimits | None = None
    shows_timing: bool = False
    shares_id: bool = False
    """Whether the id is used as it is, although other requests may have it, or it is empty."""

    def take_id(self, admission: Admission) -> str:
        """Gives the request its id, or one that begins with it if another request has that; returns it."""
        if not self.shares_id:
            return admission.take_id(self.id)
        if self.id:
            admission.set_id(self.id)
        return self.id

    def add_options(self, admission: Admission, *, begun: bool = False) -> AddOptions:
        """What the engine is told of each text. `begun` says that it has had some of them before."""
        options = admission.caller.add_options(self.priority, self.salt)
        if self.limits is not None:
            self.limits.add_to(options, begun=begun)
        return options


class Counts(msgspec.Struct, frozen=True, gc=False):
    """Tokens so far: of one choice and its prompt, or of all."""

    prompt: int
    cached: int
    """The tokens of the prompt that were found in the prefix cache."""
    output: int
    reasoning: int | None = None
    """The tokens of the output that are reasoning; None if the answer is not read for it."""
    media: int = 0
    """The tokens of the prompt in whose place there are embeddings of media."""


class End(msgspec.Struct, frozen=True):
    """What is known once all choices have ended."""

    counts: Counts
    times: RequestTimes
    metrics: AnswerMetrics | UnsetType = UNSET
    """What became of guesses, if the operator wants it told and there is one answer."""


class Part(msgspec.Struct, gc=False):
    """What a step of the engine has added to one choice."""

    choice: int
    """The number of the choice among those of all prompts."""
    delta: Delta
    counts: Counts
    said: Sequence[AnswerPart] = ()
    """What a conversation's answer says: texts, reasoning and calls."""
    has_calls: bool = False
    """Whether a call of the choice is complete by now."""
    end: End | None = None
    """Set in the last part of all choices."""
    is_notice: bool = False
    """Whether the part brings nothing but the news that the request waits for so long as expected."""


def media_tokens(prompt: Prompt) -> int:
    """The tokens of a prompt in whose place there are embeddings of media."""
    return sum([item.embeddings for item in prompt.media])


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """What every answer repeats, and how its counts are shown."""

    id: str
    created: int
    model: str
    facts: Facts
    shows_cached: bool
    shows_timing: bool

    def usage(self, counts: Counts) -> Usage:
        """The usage that clients see of these counts."""
        cached = counts.cached if self.shows_cached else None
        return make_usage(counts.prompt, counts.output, cached, counts.reasoning, counts.media)

    def whole_usage(self, end: End) -> Usage:
        """The usage of the whole request, with its times if they are asked for."""
        usage = self.usage(end.counts)
        if self.shows_timing:
            usage.timing = end.times.report()
        return usage


def head_fields(frontend: Frontend, terms: Terms, id: str) -> dict[str, Any]:
    """The fields of `AnswerHead` of a request that was let in under this id."""
    facts = frontend.facts
    return {
        "id": id,
        "created": terms.created,
        "model": facts.model_names[0],
        "facts": facts,
        "shows_cached": frontend.config.enable_prompt_tokens_details,
        "shows_timing": terms.shows_timing,
    }


class Head(AnswerHead, frozen=True, kw_only=True):
    """The head of an answer that is text."""

    fingerprint: str | None
    names: TokenNames
    prompts: Sequence[Prompt]
    n: int
    """The answers to each prompt."""
    sends_usage: bool
    """Whether a stream ends with the usage."""
    sends_usage_always: bool
    """Whether each part of a stream has the usage so far."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    def usage_in_chunk(self, part: Part) -> Usage | UnsetType:
        """The usage in a part of a stream. The last one brings the times, if they are asked for and nothing
        for the usage alone follows."""
        if self.sends_usage_always:
            return self.usage(part.counts)
        if part.end is not None and self.shows_timing and not self.sends_usage:
            return self.whole_usage(part.end)
        return UNSET


class ConversationHead(Head, frozen=True, kw_only=True):
    conversation: Conversation
    dialect: str = ""
    """The name of the form in which the model writes calls; empty if none is read."""
    is_read: bool = False
    """Whether answers are read for reasoning and calls; else they are text and nothing else."""
    counts_reasoning: bool = False
    names_call: bool = False
    """Whether the request has named the function to call."""

    @property
    def counts_before(self) -> Counts:
        """What is counted before the first token."""
        reasoning = 0 if self.counts_reasoning else None
        return Counts(self.prompts[0].length, 0, 0, reasoning, media_tokens(self.prompts[0]))

    def finish_reason(self, part: Part) -> str | None:
        """The reason in OpenAI's words: a function that the request has named is no reason of its own."""
        finish = part.delta.finish_reason
        return "tool_calls" if part.has_calls and finish == "stop" and not self.names_call else finish
