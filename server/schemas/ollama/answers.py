"""The answers of Ollama's API."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from server.requests.timing import RequestTimes
from server.schemas.logprobs import ChatTokenLogprob


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """A duration; never 0, because clients divide by it."""
    return max(1, round(1e9 * seconds))


class CalledFunction(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Durations(msgspec.Struct, kw_only=True):
    """Times in nanoseconds, and counts of tokens, at the end of an answer."""

    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    """The time in the queue: the model is loaded already."""
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET

    def measure(self, times: RequestTimes, prompt: int) -> None:
        """Take the times of a request until now, and the tokens that it had the model read."""
        self.total_duration = nanoseconds(time.monotonic() - times.started)
        self.load_duration = nanoseconds(times.queued_time)
        self.prompt_eval_count = prompt


class OllamaAnswer(Durations, kw_only=True):
    """An answer of /api/chat, which has `message`, or of /api/generate, or one line of it."""

    model: str
    created_at: str
    message: AnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET


class Embedded(Durations, kw_only=True):
    model: str
    embeddings: list[msgspec.Raw] = []
    """Left empty: vectors are written one by one."""


class RankedDocument(msgspec.Struct):
    index: int
    relevance_score: float
    document: msgspec.Raw | UnsetType = UNSET


class Reranked(Durations, kw_only=True):
    model: str
    results: list[RankedDocument]
