"""The bodies of the endpoints that pool texts.

A text comes as a string, as token ids, or as a conversation; each of them alone or in a list. Which of these
it is, is found out before the fields are read, so that one mistake is one error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Discriminator, Field, PlainValidator, Tag, ValidationInfo, model_validator

from server.errors import BadRequest, too_many
from server.model_facts import Facts
from server.request_limits import LIMITS
from server.requests.pooling import (
    NO_TRUNCATION,
    QUERIES,
    PoolingParams,
    Source,
    Truncation,
    find_prompt,
    prompt_for,
)
from server.requests.vectors import EmbedDtype, Endianness
from server.schemas.body import (
    FIRST_ERROR,
    MEANINGLESS,
    Flag,
    ForeignField,
    Neutral,
    Text,
    check_text,
    optional,
    read_sources,
)
from server.schemas.messages import Message, Messages, TemplateOptions, picture_alone
from server.schemas.sampling_fields import RequestBody, Usage
from server.schemas.unknown_fields import note_name
from server.schemas.vendor_bodies.foreign_fields import ADAPTER_FIELDS
from server.schemas.vendor_bodies.jina import JINA, read_jina
from worker.protocol import Task

_SHAPES = (
    "Input should be a string, a list of strings, a list of token ids, a list of lists of token ids, or chat "
    "messages, and all of a list of the same kind"
)

MostTokens = Annotated[int, Field(ge=-1)]
Outputs = Annotated[list[Text], Field(min_length=1), FIRST_ERROR]
OUTPUTS_TEXT = (
    "What is given of each text from one pass, if the model does: dense, sparse (weights of tokens), tokens "
    "(a vector for each). null: what the endpoint gives usually."
)

UNSUPPORTED: dict[str, Neutral] = {
    "padding": ("do_not_pad", False),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "lora": (),
}


class PoolingBody(RequestBody):
    """Fields of every endpoint of ours that pools."""

    unsupported = UNSUPPORTED
    meaningless = MEANINGLESS
    other_names: ClassVar[Mapping[str, str]] = {
        "rid": "request_id",
        **dict.fromkeys(("normalize", "normalized", "activation", "softmax"), "use_activation"),
    }
    foreign: ClassVar[Mapping[str, ForeignField]] = ADAPTER_FIELDS

    use_activation: Flag | None = optional(
        "Normalise vectors, or turn logits into probabilities. null: as the model does; false: raw."
    )
    truncate_prompt_tokens: MostTokens | None = optional(
        "Truncate a text to so many tokens; -1 to the model's context length."
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "The end that is cut; null is right, which keeps the beginning."
    )

    def truncation(self, facts: Facts) -> Truncation:
        if self.truncate_prompt_tokens is None:
            return NO_TRUNCATION
        return Truncation.from_request(self.truncate_prompt_tokens, self.truncation_side, facts)


def _inputs(value: object) -> list[Source] | None:
    if value is None:
        return None
    texts = read_sources(value, "input", LIMITS.inputs, "texts", _SHAPES)
    return [check_text(one) if isinstance(one, str) else one for one in texts]


Inputs = Annotated[
    list[Source] | None,
    PlainValidator(_inputs, json_schema_input_type=str | list[str] | list[int] | list[list[int]] | None),
]


def _count(value: object) -> str:
    return "(many)" if isinstance(value, list) and value and isinstance(value[0], list) else "(one)"


Conversations = Annotated[
    Annotated[Messages, Tag("(one)")] | Annotated[list[Messages], FIRST_ERROR, Tag("(many)")],
    Discriminator(_count),
]


def _check_conversations(messages: object) -> None:
    """Refuses too many conversations, and too many messages in all of them, before any is read."""
    if isinstance(messages, list) and _count(messages) == "(many)":
        if len(messages) > LIMITS.inputs:
            raise too_many("messages", LIMITS.inputs, "conversations", len(messages))
        total = sum(len(one) for one in messages if isinstance(one, list))
        if total > LIMITS.conversation_messages:
            raise too_many("messages", LIMITS.conversation_messages, "messages in all", total)


class TextBody(PoolingBody, TemplateOptions):
    """A body with texts, or with conversations that the chat template writes out."""

    unsupported = UNSUPPORTED
    bounds = TemplateOptions.bounds
    stand_ins = {**TemplateOptions.stand_ins, "input": "-"}
    texts_field: ClassVar[str] = "input"

    input: Inputs = optional("Texts, as strings or token ids; or use messages.")
    messages: Conversations | None = optional("A conversation, or a list of them.")
    add_special_tokens: Flag | None = optional("null: true for texts, false for conversations.")
    add_generation_prompt: Flag = False

    @model_validator(mode="before")
    @classmethod
    def find_messages(cls, body: object, info: ValidationInfo) -> object:
        """Moves messages, or lists of them, from `input` to `messages`."""
        given = body.get("input") if isinstance(body, dict) else None
        first = given[0] if isinstance(given, list) and given else None
        if isinstance(first, list) and first:
            first = first[0]
        if isinstance(body, dict) and (isinstance(first, dict) or body.get("messages") is not None):
            _check_conversations(given if isinstance(first, dict) else body.get("messages"))
        if not isinstance(body, dict) or not isinstance(first, dict):
            return body
        if body.get("messages") is not None:
            raise BadRequest("Exactly one of `input` and `messages` must be given.", "input")
        note_name(info.context, "messages", "input")
        return {**{name: value for name, value in body.items() if name != "input"}, "messages": given}

    @model_validator(mode="after")
    def check_one_input(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise BadRequest("Exactly one of `input` and `messages` must be given.", "input")
        if self.input == [] or self.messages == []:
            raise BadRequest("`input` must not be empty: give at least one text.", "input")
        return self

    @property
    def sources(self) -> list[Source]:
        """The texts, unless conversations came in their place."""
        return self.input or []

    def conversations(self) -> list[list[Message]]:
        if self.messages and isinstance(self.messages[0], list):
            return cast("list[list[Message]]", self.messages)
        return [cast("list[Message]", self.messages)] if self.messages else []

    def prompt(self, task: Task, facts: Facts) -> str:
        """The instruction that is written before each text."""
        return ""


class VectorsBody(TextBody):
    """Fields for the instruction that texts are read with, and for the form of their vectors."""

    unsupported = UNSUPPORTED

    modality: Literal["text", "image"] = Field(
        default="text", description="image: each of `input` is the URL of a picture, as Infinity has it."
    )

    prompt_name: Text | None = optional(
        "Name of the model's prompt that is written before each text. null: the default, if any."
    )
    input_type: Text | None = optional(
        "The texts' purpose, such as query or document: finds the prompt for it."
    )
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = Field(
        default="float",
        description="bytes: the bare numbers, and a header `metadata` that tells which are whose; "
        "bytes_only: without it.",
    )
    embed_dtype: EmbedDtype = Field(
        default="float32",
        description="Number type. int8 and uint8 divide each number's range into 255 steps, as "
        "sentence-transformers does; binary and ubinary have a bit for each number.",
    )
    endianness: Endianness = Field(default="native", description="Byte order of base64 and bytes.")
    dimensions: int | None = optional(
        "Number of dimensions to keep of each vector (Matryoshka), if the model was trained for it."
    )
    outputs: Outputs | None = optional(OUTPUTS_TEXT)

    @model_validator(mode="after")
    def check_vectors(self) -> Self:
        if self.prompt_name is not None and self.input_type is not None:
            field = self.purpose_field
            raise BadRequest(f"`prompt_name` and `{field}` both choose the prompt; give one.", field)
        asked = self.prompt_name or self.input_type
        if asked is not None and (self.messages or not isinstance((self.input or [""])[0], str)):
            raise BadRequest(
                "Prompts are written before texts only, not before ids or messages.", "prompt_name"
            )
        if self.encoding_format == "float" and self.embed_dtype.startswith("fp8"):
            raise BadRequest(
                "Numbers of 8 bits are for the encoding formats base64, bytes and bytes_only.", "embed_dtype"
            )
        if self.modality == "image" and not all(isinstance(url, str) for url in self.input or [0]):
            raise BadRequest("With the modality image, `input` is a URL or a list of URLs.", "input")
        return self

    def conversations(self) -> list[list[Message]]:
        if self.modality == "text":
            return super().conversations() if self.messages else []
        return [picture_alone(url) for url in self.input or [] if isinstance(url, str)]

    def prompt(self, task: Task, facts: Facts) -> str:
        if self.input_type is not None:
            return prompt_for(self.input_type, facts, self.purpose_field)
        return find_prompt(self.prompt_name, facts, task)

    @property
    def purpose_field(self) -> str:
        """The field in which the client has given `input_type`."""
        return "input_type"

    def vector_params(self, task: str | None) -> PoolingParams:
        return PoolingParams(
            task=task,
            use_activation=self.use_activation,
            dimensions=self.dimensions,
            outputs=self.outputs,
            query=(self.input_type or self.prompt_name) in QUERIES,
        )


class EmbeddingRequest(VectorsBody):
    unsupported = {**UNSUPPORTED, "late_chunking": (False,)}
    of_dialects = dict.fromkeys(
        ("truncation", "output_dimension", "output_dtype"), ("/v1/embeddings", "voyage")
    )

    @model_validator(mode="before")
    @classmethod
    def read_jina(cls, body: object) -> object:
        given = body.get("input") if isinstance(body, dict) else None
        holds = isinstance(given, list) and given and isinstance(given[0], dict)
        if isinstance(body, dict) and (holds or not body.keys().isdisjoint(JINA)):
            return read_jina(body)
        return body

    task: Text | None = optional("Jina's word for `input_type`: retrieval.query, retrieval.passage, ...")

    @property
    def purpose_field(self) -> str:
        return "input_type" if self.task is None else "task"

    def params(self) -> PoolingParams:
        return self.vector_params("embed")


class PicturesRequest(EmbeddingRequest):
    modality: Literal["text", "image"] = "image"


class PoolingRequest(VectorsBody):
    task: Text | None = optional(
        "embed, token_embed, sparse_embed, classify or token_classify; also encode, score and reward. null: "
        "the first of them that the model does."
    )

    @model_validator(mode="after")
    def check_task(self) -> Self:
        if self.task is not None and self.outputs is not None:
            raise BadRequest("`task` and `outputs` both choose what is given; give one.", "outputs")
        return self

    def params(self) -> PoolingParams:
        return self.vector_params(self.task)


class PooledList(msgspec.Struct, kw_only=True):
    """The list that answers a request. Its entries, which may be very many, are written one by one."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Any] = []
    usage: Usage


class Embedding(msgspec.Struct, kw_only=True):
    """A text's vectors: those of the outputs that were asked for, or the dense one."""

    index: int
    object: str = "embedding"
    embedding: msgspec.Raw | UnsetType = UNSET
    sparse: msgspec.Raw | UnsetType = UNSET
    tokens: msgspec.Raw | UnsetType = UNSET


class PoolingData(msgspec.Struct, kw_only=True):
    index: int
    object: str = "pooling"
    data: msgspec.Raw | dict[str, msgspec.Raw]
    """By output, if the request names some."""


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ByteRange(msgspec.Struct, kw_only=True):
    """The position of a vector in a body of bytes."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: tuple[int, ...]
