"""What a chat request says of reasoning: under our names, llama.cpp's and OpenRouter's."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from server.api.fields import Body, Flag
from server.errors import BadRequest
from server.text.style import Effort

Budget = Annotated[int, Field(ge=-1)]


class Reasoning(BaseModel):
    """OpenRouter's object."""

    model_config = ConfigDict(extra="forbid")

    effort: Effort | None = None
    max_tokens: Budget | None = None
    exclude: Flag | None = None
    enabled: Flag | None = None


class ReasoningOptions(Body):
    include_reasoning: Flag = Field(default=True, description="Answer with the reasoning too.")
    reasoning_effort: Effort | None = Field(
        default=None,
        description="Passed to the chat template, if that reads it; none switches thinking off where the "
        "template has a switch, and all others switch it on.",
    )
    enable_thinking: Flag | None = Field(
        default=None, description="The template's switch for thinking, whatever its name there."
    )
    thinking_token_budget: Budget | None = Field(
        default=None,
        description="The most tokens of reasoning, after which its end is written; -1 is no bound.",
    )
    reasoning_budget: Budget | None = Field(
        default=None, description="thinking_token_budget, as llama.cpp has it."
    )
    reasoning: Reasoning | None = Field(
        default=None,
        description="OpenRouter's object: `effort` is reasoning_effort, `max_tokens` thinking_token_budget, "
        "`exclude: true` is include_reasoning: false, and `enabled` is enable_thinking.",
    )

    @model_validator(mode="after")
    def check_reasoning(self) -> Self:
        told = self.reasoning or Reasoning()
        for ours, other, name in (
            (self.reasoning_effort, told.effort, "reasoning_effort"),
            (self.enable_thinking, told.enabled, "enable_thinking"),
        ):
            if ours is not None and other is not None and ours != other:
                raise BadRequest(f"`reasoning` and `{name}` say different things. Give one of them.", name)
        if len(budgets := self._budgets()) > 1:
            names = ", ".join(f"`{name}`" for name in budgets)
            raise BadRequest(f"{names} say the same thing. Give one of them.", next(iter(budgets)))
        return self

    @property
    def effort(self) -> Effort | None:
        return self.reasoning.effort if self.reasoning and self.reasoning.effort else self.reasoning_effort

    @property
    def thinks(self) -> bool | None:
        """The template's switch for thinking, if it is told."""
        return (
            self.enable_thinking
            if self.reasoning is None or self.reasoning.enabled is None
            else (self.reasoning.enabled)
        )

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer has the reasoning in it."""
        return self.include_reasoning and not (self.reasoning and self.reasoning.exclude)

    @property
    def thinking_budget(self) -> int | None:
        """The most tokens of reasoning, if there is a bound."""
        budget = next(iter(self._budgets().values()), None)
        return None if budget == -1 else budget

    def _budgets(self) -> dict[str, int]:
        """The budgets that were given, by the field that has each."""
        given = {
            "thinking_token_budget": self.thinking_token_budget,
            "reasoning_budget": self.reasoning_budget,
            "reasoning.max_tokens": self.reasoning.max_tokens if self.reasoning else None,
        }
        return {name: budget for name, budget in given.items() if budget is not None}
