"""What a request says of reasoning: under our names, llama.cpp's and OpenRouter's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from server.api.fields import Body, Flag
from server.errors import BadRequest
from server.text.chat_template import Effort

Budget = Annotated[int, Field(ge=-1)]


class Reasoning(BaseModel):
    """OpenRouter's object."""

    model_config = ConfigDict(extra="forbid")

    effort: Effort | None = None
    max_tokens: Budget | None = None
    exclude: Flag | None = None
    enabled: Flag | None = None


class BudgetOptions(Body):
    """What prompts of text may have, too."""

    thinking_token_budget: Budget | None = Field(
        default=None,
        description="The most tokens of reasoning, after which its end is written; -1 is no bound.",
    )
    reasoning_budget: Budget | None = Field(
        default=None, description="thinking_token_budget, as llama.cpp has it."
    )

    @property
    def thinking_budget(self) -> int | None:
        """The most tokens of reasoning, if there is a bound."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def read_budget(self) -> None:
        """Puts a budget under another name where ours has it."""
        self._take("thinking_token_budget", "reasoning_budget", self.reasoning_budget)
        self.reasoning_budget = None

    def _take(self, field: str, name: str, value: object) -> None:
        """Raises BadRequest if the field says something else than its other name."""
        if value is None:
            return
        if getattr(self, field) not in (None, value):
            raise BadRequest(f"`{name}` and `{field}` say different things. Give one of them.", name)
        setattr(self, field, value)


class ReasoningOptions(BudgetOptions):
    include_reasoning: Flag = Field(default=True, description="Answer with the reasoning too.")
    reasoning_effort: Effort | None = Field(
        default=None,
        description="Passed to the chat template, if that reads it; none switches thinking off where the "
        "template has a switch, and all others switch it on.",
    )
    enable_thinking: Flag | None = Field(
        default=None, description="The template's switch for thinking, whatever its name there."
    )
    reasoning: Reasoning | None = Field(
        default=None,
        description="OpenRouter's object: `effort` is reasoning_effort, `max_tokens` thinking_token_budget, "
        "`exclude: true` is include_reasoning: false, and `enabled` is enable_thinking.",
    )

    def read_reasoning(self) -> None:
        """Puts what was said under other names where ours have it."""
        told = self.reasoning or Reasoning()
        self._take("reasoning_effort", "reasoning.effort", told.effort)
        self._take("enable_thinking", "reasoning.enabled", told.enabled)
        self.read_budget()
        self._take("thinking_token_budget", "reasoning.max_tokens", told.max_tokens)
        if told.exclude:
            self.include_reasoning = False
        self.reasoning = None
