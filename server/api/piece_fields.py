"""The fields by which a text is cut into pieces that get vectors of their own, from one reading of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from server.api.fields import Body, optional
from server.errors import BadRequest, too_many
from server.model_facts import LIMITS
from server.requests.pieces import Cutting, Span

_SHAPES = "Input should be a list of pairs [start, stop] of integers, or such a list for each text"


def _is_span(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and set(map(type, value)) == {int}


def _spans(value: object) -> list[list[Span]]:
    """The spans of each text; a bare list is that of the only one."""
    given: Any = value
    lists: list[list[list[int]]] = (
        given if isinstance(value, list) and value and not _is_span(value[0]) else [given]
    )
    if not all(isinstance(spans, list) and spans and all(map(_is_span, spans)) for spans in lists):
        raise PydanticCustomError("spans_type", _SHAPES)
    total = sum(map(len, lists))
    if total > LIMITS.inputs:
        raise too_many("spans", LIMITS.inputs, "spans in all", total)
    return [[(start, stop) for start, stop in spans] for spans in lists]


Spans = Annotated[
    list[list[Span]],
    PlainValidator(_spans, json_schema_input_type=list[list[int]] | list[list[list[int]]]),
]


class Chunking(Body):
    size: Annotated[int, Field(ge=1)] = Field(description="The tokens of each piece.")
    overlap: Annotated[int, Field(ge=0)] = Field(default=0, description="Those that it shares with the next.")

    @model_validator(mode="after")
    def check_overlap(self) -> Self:
        if self.overlap >= self.size:
            raise BadRequest("`overlap` must be less than `size`, or pieces would not go on.", "chunking")
        return self


class PieceFields(BaseModel):
    """Fields of a body with texts."""

    spans: Spans | None = optional(
        "Pieces [start, stop) of each text, one list for each; of one text, its list alone. Each gets a "
        "dense vector, made of its tokens, which have read the whole text."
    )
    span_unit: Literal["characters", "tokens"] | None = optional(
        "What spans count, and those of the answer. null: characters of texts, and tokens of token ids."
    )
    chunking: Chunking | None = optional("Cuts each text into pieces of so many tokens, in place of `spans`.")

    @model_validator(mode="after")
    def check_pieces(self) -> Self:
        if self.spans is not None and self.chunking is not None:
            raise BadRequest("`spans` and `chunking` both cut the texts; give one.", "spans")
        if self.span_unit is not None and self.spans is None and self.chunking is None:
            raise BadRequest("`span_unit` says what `spans` count; there are none.", "span_unit")
        return self

    def cutting(self, sources: list[Any]) -> Cutting | None:
        """How the texts are cut, if they are."""
        if self.spans is not None and len(self.spans) != len(sources):
            raise BadRequest(
                f"`spans` has {len(self.spans)} lists, and there are {len(sources)} texts.", "spans"
            )
        if self.spans is None and self.chunking is None:
            return None
        chunking = self.chunking
        sizes = (0, 0) if chunking is None else (chunking.size, chunking.overlap)
        return Cutting(self.spans, self.span_unit, *sizes)
