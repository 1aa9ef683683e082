"""Fields that requests share: how to run, to sample, to stream, what to return; and the usage of answers.

Bodies only say what the fields mean. Ranges are checked in one place for all callers,
`server.requests.sampling_params`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, model_validator

from server.errors import BadRequest
from server.request_limits import LIMITS
from server.requests.beam_search import BeamParams
from server.requests.repetition import RepetitionDetectionParams
from server.requests.sampling_params import SamplingParams
from server.requests.timing import TimingReport
from server.schemas.answer_form import StructuredBody
from server.schemas.body import FIRST_ERROR, Body, Bounds, Flag, Ids, Text, Texts, optional

Budget = Annotated[int, Field(ge=-1)]

FILLS_CONTEXT = -1
"""The max_tokens of an answer that fills the context, as clients of llama.cpp and LM Studio send it."""


class BudgetOptions(Body):
    """The fields for a budget of thinking."""

    thinking_token_budget: Budget | None = optional(
        "Maximum number of reasoning tokens, after which reasoning is ended; -1 is no limit."
    )

    @property
    def thinking_budget(self) -> int | None:
        """The most tokens of reasoning, if there is a bound."""
        asked = self.thinking_token_budget
        return None if asked is None or asked == -1 else min(asked, 2**63 - 1)  # as engines are told it


Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

_CACHE_SALT = re.compile(r"[^@/\\\x00]{1,128}")


def check_cache_salt(salt: str) -> None:
    if not _CACHE_SALT.fullmatch(salt):
        raise BadRequest(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\', "
            "or NUL. It must not be empty either.",
            "cache_salt",
        )


def _strings(value: object) -> object:
    """Makes a list of one string or of null. A union type would report one error for each of its members."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


Strings = Annotated[Texts, BeforeValidator(_strings, json_schema_input_type=str | list[str] | None)]


def _or_empty(value: object) -> object:
    return [] if value is None else value


NO_ENTRIES: Any = Field(default_factory=list, json_schema_extra={"default": []})
"""The default of a list: cheaper than an empty one, which pydantic would copy with care for each request."""

Timeout = Annotated[
    Annotated[float, Field(gt=0, le=1e6)] | None,
    Field(
        description="Seconds that the request may take, from its arrival; the header X-Request-Timeout and "
        "the server's --request-timeout may make it less."
    ),
]

Include = Annotated[list[Literal["timing"]], FIRST_ERROR, BeforeValidator(_or_empty)]
"""The parts of an answer that a request may ask for."""
INCLUDE: Any = Field(
    default_factory=list,
    json_schema_extra={"default": []},
    description="Parts of the answer that come on request. timing: `usage.timing`, in a stream with its last "
    "chunk; of several choices or texts, queue, prefill and decode are the times of the one that ended last, "
    "and compute and steps are sums.",
)


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """The fields of a request as a whole, whichever endpoint it is for."""

    model: str | None = None
    request_id: str | None = None
    priority: int = 0
    salt: str = ""
    include: Sequence[str] = ()
    """The parts of the answer that only come if they are asked for."""
    timeout: float | None = None
    """The seconds that the request may take."""


class RequestBody(Body):
    """Fields of requests that generate and of those that pool."""

    model: Text | None = optional("null is the served model.")
    request_id: str | None = None
    timeout: Timeout = None
    priority: Int64 = Field(
        default=0,
        description="Above 0: background work, which gets what others leave. Under --scheduling-policy "
        "priority, lower numbers run earlier. The header X-Priority goes before it.",
    )
    cache_salt: Text | None = optional("Share cached prefixes with equal salts only.")
    include: Include = INCLUDE

    @model_validator(mode="after")
    def check_salt(self) -> Self:
        if self.cache_salt is not None:
            check_cache_salt(self.cache_salt)
        return self

    @property
    def terms(self) -> RequestTerms:
        salt = self.cache_salt or ""
        return RequestTerms(self.model, self.request_id, self.priority, salt, self.include, self.timeout)


class StreamOptions(Body):
    meaningless = frozenset({"include_obfuscation"})

    include_usage: Flag | None = Field(default=False, description="Send one more chunk with the usage.")
    continuous_usage_stats: Flag | None = Field(
        default=False, description="Send the usage so far in every chunk."
    )


class RepetitionDetection(Body):
    max_pattern_size: int = Field(default=0, description="Tokens of a pattern at most; 0 looks for none.")
    min_pattern_size: int = Field(default=0, description="Tokens of a pattern at least; 0 is 1.")
    min_count: int = Field(default=0, description="Copies of it, one behind another, that end the answer.")


class GenerationBody(RequestBody, StructuredBody):
    """Fields of both endpoints. null is the same as leaving a field out, unless its description differs."""

    bounds: ClassVar[Bounds] = {
        "stop": (LIMITS.stop_strings, "strings"),
        "logit_bias": (LIMITS.logit_bias, "entries"),
        "bad_words": (LIMITS.bad_words, "words"),
        "stop_token_ids": (LIMITS.stop_token_ids, "ids"),
        "allowed_token_ids": (LIMITS.allowed_token_ids, "ids"),
        "vllm_xargs": (64, "arguments"),
    }

    n: int | None = 1
    temperature: float | None = optional("0 is greedy. null: the checkpoint's default.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = optional(
        "Typical sampling: sample from the tokens whose surprise is nearest to the mean; 1 is all."
    )
    top_n_sigma: float | None = optional(
        "Sample from tokens with logits at most so many standard deviations below the largest; 0 is all."
    )
    repetition_penalty: float | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    seed: Int64 | None = optional("Draws the same tokens again while `system_fingerprint` stays the same.")
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Annotated[Texts, BeforeValidator(_or_empty)] = NO_ENTRIES

    min_tokens: int | None = 0
    stop: Strings = NO_ENTRIES
    stop_token_ids: Annotated[Ids, BeforeValidator(_or_empty)] = NO_ENTRIES
    ignore_eos: Flag | None = False
    repetition_detection: RepetitionDetection | None = optional(
        "End an answer whose tail repeats itself, with the finish reason `repetition`; as vLLM has it."
    )
    include_stop_str_in_output: Flag | None = False
    skip_special_tokens: Flag | None = True
    spaces_between_special_tokens: Flag | None = True

    prompt_logprobs: int | None = None
    echo: Flag | None = False
    return_token_ids: Flag | None = False
    return_tokens_as_token_ids: Flag | None = optional(
        "Write tokens of logprobs as `token_id:123`. null: what the server was started with."
    )

    use_beam_search: Flag | None = Field(
        default=False,
        description="Search for the likeliest answers, of which n are followed at a time. Not with `stream`, "
        "nor with what bounds or changes the choice of tokens.",
    )
    length_penalty: float | None = Field(
        default=1.0,
        description="Beam search compares answers by the sum of their logprobs by their length, the prompt's "
        "included, to this power.",
    )
    early_stopping: Flag | None = Field(
        default=False, description="End a beam search with the n-th answer that ends, likely or not."
    )

    speculative_tokens: int | None = optional(
        "Maximum number of speculative tokens at a time; 0 turns speculation off, null leaves it to the "
        "server. Answers do not depend on it."
    )

    vllm_xargs: dict[str, Any] | None = optional("Arguments for the operator's logits processors.")

    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = optional(
        "Truncate the prompt to so many tokens; -1 to what leaves room for the answer."
    )
    truncation_side: str | None = Field(
        default=None,
        pattern="^(left|right)$",
        description="The end that is cut; left keeps the end of the prompt.",
    )

    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = optional(
        "Tokens per chunk, if more than the server's own interval."
    )

    @model_validator(mode="after")
    def check_generation(self) -> Self:
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise BadRequest("Stream options can only be defined when `stream=True`.", "stream_options")
        if self.stream and self.prompt_logprobs == 0:  # taken by vLLM, whose stream has none either
            self.prompt_logprobs = None
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if self.use_beam_search and self.stream:
            raise BadRequest("Streaming is not currently supported with beam search.", "stream")
        if not self.use_beam_search and (self.early_stopping or self.length_penalty not in (None, 1.0)):
            name = "early_stopping" if self.early_stopping else "length_penalty"
            raise BadRequest(f"`{name}` is for beam search: set `use_beam_search` too.", name)
        return self

    @property
    def shown(self) -> int:
        """The number of answers to each prompt that the client gets."""
        return 1 if self.n is None else self.n

    @property
    def made(self) -> int:
        """The number of answers to each prompt that are made; a beam search follows so many."""
        return self.shown

    def beams(self) -> BeamParams:
        """The beam search, if `use_beam_search` asks for one."""
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamParams(self.made, penalty, early_stopping=bool(self.early_stopping))

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        loops = self.repetition_detection
        return SamplingParams(
            n=self.made,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            typical_p=self.typical_p,
            top_n_sigma=self.top_n_sigma,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            repetition_detection=None if loops is None else RepetitionDetectionParams(**loops.model_dump()),
            ignore_eos=bool(self.ignore_eos),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            bad_words=self.bad_words,
            logit_bias=_by_token_id(self.logit_bias) if self.logit_bias else {},
            allowed_token_ids=self.allowed_token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens is not False,
            spaces_between_special_tokens=self.spaces_between_special_tokens is not False,
            speculative_tokens=self.speculative_tokens,
            extra_args=self.vllm_xargs,
        )


def _by_token_id(bias: dict[str, float]) -> dict[int, float]:
    wrong = [key for key in bias if not re.fullmatch(r"-?[0-9]{1,18}", key)]
    if wrong:
        raise BadRequest(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong[:10]}",
            "logit_bias",
        )
    return {int(key): value for key, value in bias.items()}


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The part of a stream's chunk for one choice."""

    index: int

    @property
    def is_empty(self) -> bool:
        """Whether a client learns nothing from it, so that it is not sent."""
        return False


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    multimodal_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """The number of tokens that a request took, as answers of generating and pooling endpoints report it."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    timing: TimingReport | UnsetType = UNSET


def make_usage(
    prompt: int, completion: int, cached: int | None = None, reasoning: int | None = None, media: int = 0
) -> Usage:
    """Makes the usage.

    `cached` is None unless the operator wants cached tokens to be shown, and those of media, `reasoning`
    unless answers are read for it.
    """
    details = UNSET if cached is None else PromptTokensDetails(cached, media or UNSET)
    return Usage(
        prompt_tokens=prompt,
        total_tokens=prompt + completion,
        completion_tokens=completion,
        prompt_tokens_details=details,
        completion_tokens_details=UNSET if reasoning is None else CompletionTokensDetails(reasoning),
    )
