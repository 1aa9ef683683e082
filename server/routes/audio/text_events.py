"""The events of a text that is told while it comes, in OpenAI's form and in vLLM's."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from server.http.sse import DONE, event
from server.schemas.audio.answers import (
    Choice,
    ChunkUsage,
    DeltaEvent,
    DoneEvent,
    SpokenLogprob,
    TokenUsage,
)


class TextEvents:
    def __init__(self, id: str, created: int, model: str) -> None:
        self._head, self._said = (id, created, model), list[str]()

    def delta(self, text: str) -> bytes:
        self._said.append(text)
        return event(self._delta(text))

    def end(
        self,
        prompt_tokens: int,
        tokens: int,
        *,
        tells_usage: bool,
        finish: str = "stop",
        logprobs: list[SpokenLogprob] | UnsetType = UNSET,
    ) -> bytes:
        """The last events. `tells_usage`: whether clients of vLLM want the counts, too."""
        total = prompt_tokens + tokens
        last = self._delta("", finish)
        if tells_usage:
            last.usage = ChunkUsage(prompt_tokens, tokens, total)
        done = DoneEvent("".join(self._said), TokenUsage(prompt_tokens, tokens, total), logprobs)
        return event(last) + event(done) + DONE

    def _delta(self, text: str, finish: str | None = None) -> DeltaEvent:
        choice = Choice({"content": text} if text else {}, finish_reason=finish)
        return DeltaEvent(text, *self._head, [choice])
