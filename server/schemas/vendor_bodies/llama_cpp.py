"""llama.cpp's own bodies: of /completion, /embedding and /tokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from server.errors import BadRequest
from server.schemas.body import MEANINGLESS, Body, Flag, ForeignField, Text, optional
from server.schemas.completions import CompletionRequest, Prompts
from server.schemas.sampling_fields import FILLS_CONTEXT
from server.schemas.tei import EmbedRequest


class PlainCompletion(CompletionRequest):
    """Fields of /v1/completions, but for those that an answer of another form has no place for."""

    @model_validator(mode="after")
    def check_form(self) -> Self:
        for name in ("echo", "best_of", "prompt_logprobs", "return_tokens_as_token_ids"):
            if getattr(self, name) not in (None, False):
                raise BadRequest(f"`{name}` is for /v1/completions.", name)
        return self

    @property
    def scores_only(self) -> bool:
        """Whether the prompt is read into the cache, and nothing is answered."""
        return self.max_tokens == 0


class LlamaCompletion(PlainCompletion):
    """An answer fills the context if nothing bounds it."""

    other_names = {**CompletionRequest.other_names, "return_tokens": "return_token_ids"}
    foreign: ClassVar[Mapping[str, ForeignField]] = {
        **CompletionRequest.foreign,
        "n_probs": ForeignField(lambda value, notes: {"logprobs": value or None}, "logprobs; 0 is none."),
    }

    max_tokens: int | None = Field(
        default=FILLS_CONTEXT,
        description="-1 fills the context; 0 has the prompt cached.",
    )

    @field_validator("logit_bias", mode="before")
    @classmethod
    def read_pairs(cls, value: object) -> object:
        """Reads llama.cpp's pairs, too: the id of a token, and its bias, or false if it may not come."""
        if not isinstance(value, list):
            return value
        if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in value):
            raise PydanticCustomError("pairs_type", "Input should be pairs of a token's id and its bias")
        return {str(id): -100 if bias is False else bias for id, bias in value}


class LlamaInfill(LlamaCompletion):
    """A place between two texts; `prompt` begins what fills it."""

    other_names = {**LlamaCompletion.other_names, "input_suffix": "suffix"}
    stand_ins = {**LlamaCompletion.stand_ins, "input_prefix": ""}

    prompt: Prompts = Field(default="", validate_default=True)
    input_prefix: Text = ""

    @property
    def fill_prefix(self) -> str:
        return self.input_prefix

    @model_validator(mode="after")
    def check_place(self) -> Self:
        self.check_suffix()
        return self


class LlamaEmbedRequest(EmbedRequest):
    meaningless = MEANINGLESS | {"model", "encoding_format"}
    other_names = {"content": "inputs", "input": "inputs"}


class LlamaTokenize(Body):
    meaningless = MEANINGLESS
    unsupported = {"parse_special": (True,)}
    stand_ins = {"content": "-"}

    model: Text | None = None
    content: Text
    add_special: Flag | None = Field(default=False, description="Add the tokenizer's own tokens.")
    with_pieces: Flag | None = optional(
        "Tell the text of each token, too, or its bytes where they are no character."
    )
