"""The request and response bodies of POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from server.errors import BadRequest
from server.schemas.body import FIRST_ERROR, MEANINGLESS, Body, Flag, Text, optional
from server.schemas.messages import Messages
from server.schemas.repaired_history import HistoryOptions


class TokenizeRequest(HistoryOptions):
    """A text, or a conversation as the chat endpoint would write it."""

    meaningless = MEANINGLESS
    stand_ins = {**HistoryOptions.stand_ins, "prompt": "-"}
    of_dialects = {"inputs": ("/tokenize", "tei"), "content": ("/tokenize", "llama.cpp")}

    model: Text | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Flag | None = optional("null: true for a text, false for a conversation.")
    return_token_strs: Flag | None = False
    return_token_offsets: Flag | None = Field(
        default=False,
        description="Return the characters from which to which each token goes, as [start, end], in the text "
        "or in what the chat template wrote; [0, 0] for tokens that stand for none. null comes for prompts "
        "with media, and with words in messages that would read as control tokens.",
    )

    @model_validator(mode="after")
    def check_one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("Exactly one of `prompt` and `messages` must be given.", "prompt")
        return self


class DetokenizeRequest(Body):
    meaningless = MEANINGLESS
    stand_ins = {"tokens": []}

    model: Text | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FIRST_ERROR]


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    token_offsets: list[tuple[int, int]] | UnsetType | None = UNSET


class Detokenized(msgspec.Struct):
    prompt: str
