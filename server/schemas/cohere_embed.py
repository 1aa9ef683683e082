"""The request and response bodies of POST /v2/embed, in Cohere's words."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from server.errors import BadRequest, invalid
from server.media.media_parts import has_media
from server.model_facts import Facts
from server.request_limits import LIMITS
from server.requests.pooling import QUERIES, PoolingParams, Source, Truncation, find_prompt, prompt_for
from server.schemas.body import FIRST_ERROR, MEANINGLESS, Body, Text, Texts, optional
from server.schemas.messages import Content, Message, picture_alone
from server.schemas.pooling_bodies import OUTPUTS_TEXT, EmbeddingRequest, Outputs
from server.schemas.sampling_fields import Int64, RequestTerms, check_cache_salt
from worker.protocol import Task

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereInput(Body):
    """A text that is given in parts."""

    content: Content

    def text(self) -> str:
        return self.message.text()

    @property
    def message(self) -> Message:
        return Message(role="user", content=self.content)


class CohereRequest(Body):
    meaningless = MEANINGLESS
    bounds = dict.fromkeys(("texts", "inputs", "images"), (LIMITS.inputs, "texts"))
    stand_ins = {"texts": ["-"], "inputs": None, "images": None}
    texts_field: ClassVar[str] = "texts"
    client_names = {"dimensions": "output_dimension"}

    model: Text | None = optional("null is the served model.")
    texts: Texts | None = None
    inputs: Annotated[list[CohereInput], FIRST_ERROR] | None = optional(
        "Texts in parts, among which pictures may be; or use texts."
    )
    images: Texts | None = optional("Pictures, as data URLs or others; or use texts.")
    input_type: Text | None = optional(
        "The texts' purpose, such as search_query: finds the model's prompt for it."
    )
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1), FIRST_ERROR] | None = optional(
        "null is float."
    )
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] = Field(
        default="END", description="The end of too long a text that is cut; NONE refuses it."
    )
    outputs: Outputs | None = optional(OUTPUTS_TEXT)
    max_tokens: Annotated[int, Field(ge=1)] | None = optional("Maximum length of a text, in tokens.")
    priority: Int64 = 0
    request_id: str | None = None
    cache_salt: Text | None = None

    @model_validator(mode="after")
    def check_one_input(self) -> Self:
        if self.cache_salt is not None:
            check_cache_salt(self.cache_salt)
        if sum(map(bool, (self.texts, self.inputs, self.images))) != 1:
            raise BadRequest(
                "Exactly one of texts, images, or inputs must be provided, and it must be non-empty", "texts"
            )
        return self

    @property
    def sources(self) -> list[Source]:
        return [*(self.texts or [one.text() for one in self.inputs or []])]

    def conversations(self) -> list[list[Message]]:
        """The inputs as a user's messages, if there are pictures among them; nothing if there are none."""
        if self.images:
            return [picture_alone(url) for url in self.images]
        inputs = self.inputs or []
        return [[one.message] for one in inputs] if any(has_media(one.content) for one in inputs) else []

    @property
    def template_options(self) -> EmbeddingRequest:
        """What decides how these messages are written."""
        return EmbeddingRequest.model_construct(cache_salt=self.cache_salt)

    @property
    def types(self) -> list[EmbeddingType]:
        return self.embedding_types or ["float"]

    @property
    def terms(self) -> RequestTerms:
        return RequestTerms(self.model, self.request_id, self.priority, self.cache_salt or "")

    def params(self) -> PoolingParams:
        return PoolingParams(
            task="embed",
            dimensions=self.output_dimension,
            outputs=self.outputs,
            query=self.input_type in QUERIES,
        )

    def prompt(self, task: Task, facts: Facts) -> str:
        """The instruction that is written before each text."""
        return prompt_for(self.input_type, facts) if self.input_type else find_prompt(None, facts)

    def truncation(self, facts: Facts) -> Truncation:
        most = self.max_tokens
        if most is not None and most > facts.max_text_len:
            raise invalid(
                "max_tokens",
                f"max_tokens={most} cannot be greater than the model's length of {facts.max_text_len}.",
                most,
            )
        if self.truncate == "NONE" and most is not None:
            raise BadRequest("`max_tokens` has texts cut, which truncate NONE forbids.", "max_tokens")
        keep = None if self.truncate == "NONE" else most or facts.max_text_len
        return Truncation(keep, left=self.truncate == "START")


class ApiVersion(msgspec.Struct):
    version: str = "2"


class BilledUnits(msgspec.Struct):
    input_tokens: int
    image_tokens: int = 0


class Meta(msgspec.Struct):
    api_version: ApiVersion
    billed_units: BilledUnits


class CohereEmbeddings(msgspec.Struct):
    """Vectors, with one list for each type that was asked for."""

    float: list[Any] | UnsetType = UNSET
    int8: list[Any] | UnsetType = UNSET
    uint8: list[Any] | UnsetType = UNSET
    binary: list[Any] | UnsetType = UNSET
    ubinary: list[Any] | UnsetType = UNSET
    base64: list[Any] | UnsetType = UNSET
    sparse: list[Any] | UnsetType = UNSET
    """Other outputs than dense vectors, if they were asked for."""
    tokens: list[Any] | UnsetType = UNSET


class CohereEmbedded(msgspec.Struct):
    id: str
    embeddings: CohereEmbeddings
    texts: list[msgspec.Raw]
    meta: Meta
    response_type: str = "embeddings_by_type"
