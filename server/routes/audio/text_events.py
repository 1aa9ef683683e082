"""The events of a text that is told while it comes, in OpenAI's form and in vLLM's."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from server.http.sse import DONE, event
from server.schemas.audio.answers import Choice, DeltaEvent, DoneEvent, SpokenLogprob, TokenUsage


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
        usage = TokenUsage(prompt_tokens, tokens, prompt_tokens + tokens, prompt_tokens, tokens)
        choices = [] if tells_usage else [Choice({"content": ""})]
        done = DoneEvent("".join(self._said), usage, choices, logprobs)
        return event(self._delta("", finish)) + event(done) + DONE

    def _delta(self, text: str, finish: str | None = None) -> DeltaEvent:
        return DeltaEvent(text, *self._head, [Choice({"content": text}, finish_reason=finish)])
