"""The bodies and answers of text-generation-inference's own endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, ValidationError

from server.api.completions import CompletionRequest
from server.api.fields import Body, Bounds, Flag, Neutral, Text, invalid_body, optional
from server.api.shared_fields import NO_ENTRIES, Int64, Strings
from server.model_facts import LIMITS

MAX_NEW_TOKENS = 100
"""The longest answer where a request does not say."""


class TextGrammar(Body):
    type: Literal["json", "regex", "json_schema"]
    value: object

    def as_structured(self) -> dict[str, object]:
        """The same in vLLM's words."""
        value = self.value
        if self.type == "json_schema" and isinstance(value, dict):
            value = value.get("schema", value)
        return {"regex" if self.type == "regex" else "json": value}


class GenerateParameters(Body):
    unsupported: ClassVar[Mapping[str, Neutral]] = {
        "adapter_id": (),
        "best_of": (1,),
        "decoder_input_details": (False,),
        "top_n_tokens": (0,),
        "typical_p": (1,),
        "watermark": (False,),
    }
    bounds: ClassVar[Bounds] = {"stop": (LIMITS.stop_strings, "strings")}

    max_new_tokens: int | None = optional(f"null is {MAX_NEW_TOKENS}.")
    do_sample: Flag | None = optional("Without it, or a temperature, top_k or top_p, answers are greedy.")
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: Strings = NO_ENTRIES
    truncate: Annotated[int, Field(ge=1)] | None = optional("Keep so many of the last tokens of the prompt.")
    return_full_text: Flag | None = optional("Answer with the prompt before the text.")
    details: Flag | None = optional("Tell the tokens and their logprobs, too.")
    grammar: TextGrammar | None = None


class GenerateRequest(Body):
    stand_ins: ClassVar[Mapping[str, object]] = {"inputs": "-"}

    inputs: Text
    parameters: GenerateParameters | None = None
    stream: Flag | None = optional("Of `/` only: /generate answers whole, and /generate_stream in a stream.")

    @property
    def asked(self) -> GenerateParameters:
        return self.parameters or GenerateParameters()

    @cached_property
    def completion(self) -> CompletionRequest:
        """The same request to completions."""
        asked = self.asked
        names = ("top_k", "top_p", "repetition_penalty", "frequency_penalty", "seed", "stop")
        fields: dict[str, Any] = {name: getattr(asked, name) for name in names}
        sampled = asked.do_sample or any(x is not None for x in (asked.temperature, asked.top_k, asked.top_p))
        fields |= {"prompt": self.inputs, "temperature": asked.temperature if sampled else 0.0}
        fields["max_tokens"] = MAX_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
        fields |= {"logprobs": 0 if asked.details else None, "truncate_prompt_tokens": asked.truncate}
        if asked.grammar is not None:
            fields["structured_outputs"] = asked.grammar.as_structured()
        try:
            return CompletionRequest.model_validate(
                {name: each for name, each in fields.items() if each is not None}
            )
        except ValidationError as error:
            raise invalid_body(error.errors(include_url=False)) from None


class Token(msgspec.Struct, kw_only=True):
    id: int
    text: str
    logprob: float
    special: bool


class Details(msgspec.Struct, kw_only=True):
    finish_reason: str
    generated_tokens: int
    seed: int | None = None
    input_length: int
    prefill: list[Token] = []
    tokens: list[Token] = []


class Generated(msgspec.Struct, kw_only=True, omit_defaults=True):
    generated_text: str
    details: Details | None = None


class TokenEvent(msgspec.Struct, kw_only=True):
    """An event of a stream; the last one has the whole text."""

    index: int
    token: Token
    generated_text: str | None = None
    details: Details | None = None
