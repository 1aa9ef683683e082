"""The request and response bodies of the endpoints that compare texts, with each other or with labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from server.errors import BadRequest
from server.media.media_parts import has_media
from server.model_facts import Facts
from server.request_limits import LIMITS
from server.requests.labels.entities import MOST_LABELS, Entity, EntityOptions
from server.requests.pooling import NO_TRUNCATION, PoolingParams, Source, Truncation
from server.requests.scoring import Pairs, ScoreOptions, Side
from server.schemas.body import FIRST_ERROR, Flag, Text, check_text, optional
from server.schemas.cohere_embed import Meta
from server.schemas.messages import Message, read_content_part
from server.schemas.pooling_bodies import UNSUPPORTED, PoolingBody, TextBody
from server.schemas.sampling_fields import RequestBody, Usage

_ONE_SHAPE = "Input should be one text, or an object with a text or with content parts"
_SHAPES = "Input should be a text, an object with a text or with content parts, or a list of them"


def _sides(value: object) -> list[Side]:
    return [_side(one) for one in (value if isinstance(value, list) else [value])]


def _side(value: object) -> Side:
    """A text, or an object that other APIs wrap around it, or content parts."""
    if isinstance(value, dict):
        value = value.get("text", value.get("content"))
    elif isinstance(value, list) and any(isinstance(part, str) for part in value):
        raise PydanticCustomError("text_type", _ONE_SHAPE)
    if isinstance(value, list):
        parts = [read_content_part(part) for part in value]
        return parts if has_media(parts) else "\n".join(part["text"] for part in parts)
    if not isinstance(value, str):
        raise PydanticCustomError("text_type", _SHAPES)
    return check_text(value)


Texts = Annotated[list[Side], PlainValidator(_sides, json_schema_input_type=str | list[str | dict[str, Any]])]
OneText = Annotated[Side, PlainValidator(_side, json_schema_input_type=str | dict[str, Any])]


Weight = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class ComparingBody(PoolingBody):
    """Fields of every endpoint that compares texts."""

    stand_ins: ClassVar[Mapping[str, object]] = {"instruction": None, "chat_template_kwargs": None}

    max_tokens_per_query: int = Field(default=0, description="Longer texts are cut; 0 is no limit.")
    max_tokens_per_doc: int = Field(default=0, description="Longer texts are cut; 0 is no limit.")
    instruction: str | None = optional("Says what makes a document a good answer; for models that read one.")
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Arguments of the template, for models that read both texts through one."
    )
    weights_for_different_modes: Annotated[list[Weight], Field(min_length=3, max_length=3)] | None = optional(
        "Compares by all that the model gives from one pass: how much dense vectors count, weights of tokens "
        "and vectors of tokens, as for BGE-M3. null: by what the model usually compares."
    )

    @model_validator(mode="after")
    def check_weights(self) -> Self:
        weights = self.weights_for_different_modes
        if weights is not None and not any(weights):
            raise BadRequest("One of the weights, at least, must be above 0.", "weights_for_different_modes")
        return self

    @property
    def names(self) -> tuple[str, str]:
        """The fields with the texts to compare."""
        return "query", "documents"

    @property
    def repeats_documents(self) -> bool:
        """Whether the answer has the documents, too."""
        return False

    def options(self, facts: Facts) -> ScoreOptions:
        weights = self.weights_for_different_modes
        return ScoreOptions(
            use_activation=self.use_activation,
            truncation=self.truncation(facts),
            max_tokens_per_query=self.max_tokens_per_query,
            max_tokens_per_doc=self.max_tokens_per_doc,
            instruction=self.instruction,
            template_kwargs=self.chat_template_kwargs,
            names=self.names,
            weights=None if weights is None else (weights[0], weights[1], weights[2]),
        )


KEYS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreRequest(ComparingBody):
    """A request whose two texts, or lists of texts, may have any of the names that clients know."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED
    bounds = {key: (LIMITS.inputs, "texts") for keys in KEYS for key in keys}
    stand_ins = {
        **ComparingBody.stand_ins,
        **{key: None for keys in KEYS for key in keys},
        "text_1": "-",
        "text_2": "-",
    }

    text_1: Texts | None = optional("One text for all of text_2, or one for each.")
    text_2: Texts | None = None
    queries: Texts | None = optional("The same as text_1.")
    documents: Texts | None = optional("The same as text_2.")
    items: Texts | None = optional("The same as text_2.")
    data_1: Texts | None = optional("The same as text_1.")
    data_2: Texts | None = optional("The same as text_2.")

    @model_validator(mode="after")
    def check_one_pair(self) -> Self:
        given = {key for keys in KEYS for key in keys if getattr(self, key) is not None}
        if given not in map(set, KEYS):
            ways = ", ".join(" and ".join(keys) for keys in KEYS)
            raise BadRequest(f"Two fields hold the texts to compare: {ways}.", "text_1")
        return self

    @property
    def names(self) -> tuple[str, str]:
        return next(keys for keys in KEYS if all(getattr(self, key) is not None for key in keys))

    def pairs(self) -> Pairs:
        first, second = self.names
        return Pairs(getattr(self, first), getattr(self, second))


class RerankRequest(ComparingBody):
    """Documents that shall be sorted by how well they answer a query."""

    unsupported = {**UNSUPPORTED, "rank_fields": (), "max_chunks_per_doc": ()}
    bounds = {"documents": (LIMITS.inputs, "texts")}
    stand_ins = {**ComparingBody.stand_ins, "query": "-", "documents": ["-"]}
    of_dialects = {
        "texts": ("/rerank", "tei"),
        "raw_scores": ("/rerank", "infinity"),
        "top_k": ("/v1/rerank", "voyage"),
        "truncation": ("/v1/rerank", "voyage"),
    }

    query: OneText
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] | None = optional("Return so many documents; 0 and null are all.")
    return_documents: Flag | None = Field(default=True, description="false: return their indexes only.")

    @property
    def repeats_documents(self) -> bool:
        return self.return_documents is not False

    def pairs(self) -> Pairs:
        return Pairs([self.query], self.documents)

    def write(self, parts: RankedParts) -> msgspec.Struct:
        """The answer."""
        results = [Ranked(index, score) for index, score in parts.best[: self.top_n or None]]
        for one in results if parts.texts else ():
            one.document = RankedDocument(msgspec.Raw(parts.texts[one.index]))
        return Ranking(id=parts.id, model=parts.model, usage=parts.usage, results=results)


def _strings(value: object) -> list[str]:
    if value == [] or not (isinstance(value, str | list) and all(isinstance(one, str) for one in value)):
        raise PydanticCustomError("texts_type", "Input should be a text, or a list of at least one text")
    return [check_text(text) for text in ([value] if isinstance(value, str) else value)]


class ClassifyRequest(TextBody):
    of_dialects = {"raw_scores": ("/classify", "infinity")}
    bounds = {**TextBody.bounds, "labels": (LIMITS.inputs, "texts")}
    stand_ins = {**TextBody.stand_ins, "labels": None}

    labels: Annotated[list[Text], Field(min_length=1), FIRST_ERROR] | None = optional(
        "Texts that each input is compared with, by models that compare pictures with texts, such as CLIP."
    )

    @property
    def sources(self) -> list[Source]:
        return [*super().sources, *(self.labels or [])]

    def conversations(self) -> list[list[Message]]:
        found = super().conversations()
        labels = [[Message(role="user", content=label)] for label in self.labels or []]
        return [*found, *labels] if found else []

    @model_validator(mode="after")
    def check_labels(self) -> Self:
        if self.labels is not None and self.use_activation is not None:
            raise BadRequest("The scores of `labels` are probabilities; leave it out.", "use_activation")
        return self

    def params(self) -> PoolingParams:
        if self.labels is not None:
            return PoolingParams(task="embed")
        return PoolingParams(task="classify", use_activation=self.use_activation)


class EntitiesRequest(RequestBody):
    """Texts in which entities of some labels are looked for."""

    unsupported = UNSUPPORTED
    bounds = {"input": (LIMITS.inputs, "texts"), "labels": (MOST_LABELS, "labels")}
    stand_ins = {"input": "-"}

    input: Annotated[list[str], PlainValidator(_strings, json_schema_input_type=str | list[str])] = Field(
        description="A text or several."
    )
    labels: Annotated[list[Text], Field(min_length=1, max_length=MOST_LABELS), FIRST_ERROR] = Field(
        description="What entities may be, in words: person, date of birth."
    )
    threshold: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="The probability that an entity's score must be above."
    )
    flat_ner: Flag = Field(default=True, description="false: entities may lie in each other.")
    multi_label: Flag = Field(default=False, description="Whether an entity may have several labels.")
    truncate: Flag = Field(
        default=False, description="Cut a text that has more words than the model was trained for."
    )

    def truncation(self, facts: Facts) -> Truncation:
        return NO_TRUNCATION

    @property
    def options(self) -> EntityOptions:
        return EntityOptions(self.threshold, self.flat_ner, self.multi_label)


class Entities(msgspec.Struct, kw_only=True):
    """The entities of a text."""

    index: int
    object: str = "entities"
    entities: list[Entity]


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


@dataclass(frozen=True, slots=True)
class RankedParts:
    """A ranking, whichever API writes it."""

    id: str
    model: str
    created: int
    usage: Usage
    best: list[tuple[int, float]]
    """The places of all documents in the request, with their scores, the highest first."""
    texts: Sequence[bytes]
    """The documents as JSON; empty if the answer does not repeat them."""

    def document(self, index: int) -> msgspec.Raw | UnsetType:
        return msgspec.Raw(self.texts[index]) if self.texts else UNSET


class RankedDocument(msgspec.Struct):
    text: msgspec.Raw
    multi_modal: None = None


class Ranked(msgspec.Struct):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    id: str
    model: str
    usage: Usage
    results: list[Ranked]
    meta: Meta | UnsetType = UNSET


def best_first(scores: list[float]) -> list[int]:
    """The indexes of the scores, the highest score first. Equal ones keep their order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])
