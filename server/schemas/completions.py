"""The request and response bodies of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, PlainValidator, model_validator

from server.errors import BadRequest, too_many
from server.request_limits import LIMITS
from server.requests.sampling_params import SamplingParams
from server.requests.speculation_reports import AnswerMetrics
from server.schemas.body import (
    MEANINGLESS,
    UNSUPPORTED,
    Bounds,
    Flag,
    ForeignField,
    Text,
    optional,
    read_sources,
)
from server.schemas.logprobs import CompletionLogprobs, PromptLogprobs
from server.schemas.sampling_fields import (
    FILLS_CONTEXT,
    BudgetOptions,
    ChunkChoice,
    GenerationBody,
    Strings,
    Usage,
)
from server.schemas.vendor_bodies.foreign_fields import GENERATION_FIELDS, GENERATION_NAMES, foreign_length

Prompt = str | list[int]

_SHAPES = "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _prompts(value: object) -> list[Prompt]:
    if value is None or value == []:
        return []
    return read_sources(value, "prompt", LIMITS.prompts, "prompts", _SHAPES)


Prompts = Annotated[
    list[Prompt],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(GenerationBody, BudgetOptions):
    unsupported = UNSUPPORTED
    meaningless = MEANINGLESS
    stand_ins = {"prompt": "-", "prompt_embeds": None, "suffix": None}
    other_names: ClassVar[Mapping[str, str]] = {**GENERATION_NAMES, "max_completion_tokens": "max_tokens"}
    foreign: ClassVar[Mapping[str, ForeignField]] = {
        **GENERATION_FIELDS,
        "n_predict": foreign_length(FILLS_CONTEXT),
    }
    bounds: ClassVar[Bounds] = {**GenerationBody.bounds, "prompt_embeds": (LIMITS.prompts, "prompts")}

    prompt: Prompts = Field(default=None, validate_default=True)
    prompt_embeds: Strings = Field(
        default_factory=list,
        json_schema_extra={"default": []},
        description="Prompts of embeddings, answered before those of `prompt`: each the base64 of a file "
        "that torch.save wrote of a tensor [tokens, hidden size]. For --enable-prompt-embeds.",
    )
    suffix: Text | None = optional(
        "The text behind the place that the answer fills, of models whose vocabulary has tokens for that."
    )
    max_tokens: int | None = Field(
        default=16, description="null is 16, -1 fills the context; 0 goes with echo only."
    )
    logprobs: int | None = optional("Most likely tokens to report beside the chosen one.")
    add_special_tokens: Flag | None = True

    best_of: int | None = optional(
        "Draw so many answers to each prompt, and answer the n whose tokens were the most likely "
        "in the mean. Not with `stream`, unless it equals n. Of a beam search it is the width. The usage "
        "counts all of them."
    )

    @model_validator(mode="after")
    def check_prompts(self) -> Self:
        if self.prompt_embeds:
            self._check_embeds()
        elif not self.prompt:
            raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if self.suffix:
            self.check_suffix()
        return self

    @property
    def fill_prefix(self) -> str | None:
        """The text before the place to fill, if prompts begin what fills it; None: they are that text."""
        return None

    def check_suffix(self) -> None:
        """Raises BadRequest if the request asks for what does not go with a place to fill."""
        alone = not (self.echo or self.truncate_prompt_tokens is not None or self.prompt_embeds)
        if not alone or not all(isinstance(prompt, str) for prompt in self.prompt):
            raise BadRequest(
                "`suffix` goes with texts as prompts, and neither with `echo` nor `truncate_prompt_tokens`.",
                "suffix",
            )

    def _check_embeds(self) -> None:
        if self.prompt == [""]:  # clients that must give a prompt give this one
            self.prompt = []
        if (count := len(self.prompt) + len(self.prompt_embeds)) > LIMITS.prompts:
            raise too_many("prompt_embeds", LIMITS.prompts, "prompts with those of `prompt`", count)

    @model_validator(mode="after")
    def check_best_of(self) -> Self:
        if self.best_of is None:
            return self
        if self.best_of < self.shown or self.best_of > LIMITS.n:
            raise BadRequest(
                f"best_of must be at least n and at most {LIMITS.n}, got {self.best_of} with n={self.shown}.",
                "best_of",
            )
        if self.stream and self.chooses:
            raise BadRequest("best_of above n cannot be streamed: the best are known at the end.", "best_of")
        return self

    @property
    def chooses(self) -> bool:
        """Whether more answers are made than shown."""
        return self.made > self.shown

    @property
    def ranks(self) -> bool:
        """Whether the likeliest answers are shown; those of a beam search come in order."""
        return self.chooses and not self.use_beam_search

    @property
    def made(self) -> int:
        return self.best_of or self.shown

    @property
    def scores_only(self) -> bool:
        """True for echo without new tokens: the answer is the prompt and its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def most_tokens(self) -> int | None:
        """The longest answer, as the engine makes it."""
        # The engine runs no request for zero tokens: one is made and not shown.
        if self.scores_only:
            return 1
        if self.max_tokens == FILLS_CONTEXT:
            return None
        return 16 if self.max_tokens is None else self.max_tokens

    def to_sampling(self) -> SamplingParams:
        echoed = self.logprobs if self.echo else None
        return self.sampling(
            max_tokens=self.most_tokens,
            logprobs=self.logprobs or 0 if self.ranks else self.logprobs,
            prompt_logprobs=echoed if self.prompt_logprobs is None else self.prompt_logprobs,
        )


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    """Changes with all that decides the bits of an answer: while it stays, a seed repeats its text."""
    usage: Usage
    metrics: AnswerMetrics | UnsetType = UNSET


class CompletionChunkChoice(ChunkChoice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType = UNSET
