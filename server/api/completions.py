"""The request and response bodies of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, cast

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from server.api.common import CacheDiagnoses, GenerationBody, Usage
from server.api.fields import MEANINGLESS, UNSUPPORTED, Flag
from server.api.logprobs import CompletionLogprobs, PromptLogprobs
from server.errors import BadRequest, too_many
from server.requests.facts import LIMITS
from server.requests.sampling import SamplingParams

Prompt = str | list[int]

_SHAPES = "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _is_ids(value: object) -> bool:
    # type() and not isinstance(), because true is not a token
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _prompts(value: object) -> list[Prompt]:
    if value is None or value == []:
        raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    prompts = value if isinstance(value, list) else [value]
    if len(prompts) > LIMITS.prompts and type(prompts[0]) is not int:
        raise too_many("prompt", LIMITS.prompts, "prompts", len(prompts))
    if isinstance(value, str) or _is_ids(value):
        return [cast("Prompt", value)]
    if all(isinstance(one, str) for one in prompts) or all(_is_ids(one) for one in prompts):
        return cast("list[Prompt]", prompts)
    raise PydanticCustomError("prompt_type", _SHAPES)


Prompts = Annotated[
    list[Prompt],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(GenerationBody):
    unsupported = {**UNSUPPORTED, "response_format": ({"type": "text"},)}
    meaningless = MEANINGLESS | {"best_of"}  # checked below
    stand_ins = {"prompt": "-"}

    prompt: Prompts = Field(default=None, validate_default=True)
    max_tokens: int | None = Field(default=16, description="null fills the context; 0 goes with echo only.")
    logprobs: int | None = Field(
        default=None, description="Most likely tokens to report beside the chosen one."
    )
    add_special_tokens: Flag | None = True

    @model_validator(mode="before")
    @classmethod
    def check_best_of(cls, body: object) -> object:
        if isinstance(body, dict) and body.get("best_of") not in (None, body.get("n", 1)):
            raise BadRequest(
                "`best_of` is not supported yet unless it equals `n`. Leave it out of the request.", "best_of"
            )
        return body

    @property
    def scores_only(self) -> bool:
        """True for echo without new tokens: the answer is the prompt and its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def most_tokens(self) -> int | None:
        """The longest answer, as the engine makes it."""
        # The engine runs no request for zero tokens: one is made and not shown.
        return 1 if self.scores_only else self.max_tokens

    def to_sampling(self) -> SamplingParams:
        echoed = self.logprobs if self.echo else None
        return self.sampling(
            max_tokens=self.most_tokens,
            logprobs=self.logprobs,
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
    cache_diagnosis: CacheDiagnoses = UNSET


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    index: int
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
