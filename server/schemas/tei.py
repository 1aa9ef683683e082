"""The bodies of text-embeddings-inference's own endpoints."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError

from server.errors import BadRequest, too_many
from server.model_facts import Facts
from server.request_limits import LIMITS
from server.requests.pooling import QUERIES, PoolingParams, Source, Truncation, find_prompt
from server.requests.scoring import Pairs, ScoreOptions
from server.schemas.body import (
    FIRST_ERROR,
    Body,
    Flag,
    Ids,
    Text,
    Texts,
    check_text,
    is_ids,
    optional,
)
from server.schemas.pooling_bodies import Inputs
from server.schemas.sampling_fields import RequestTerms
from server.schemas.score_and_rerank import RankedParts
from worker.protocol import Task


def _some(inputs: list[Source] | None) -> list[Source]:
    if not inputs:
        raise BadRequest("`inputs` must not be empty: give at least one text.", "inputs")
    return inputs


SomeInputs = Annotated[Inputs, AfterValidator(_some)]


class TeiBody(Body):
    unsupported = {"parameters": ({},), "encoding_format": ("float",)}

    truncate: Flag | None = Field(default=False, description="Cut a text that is too long.")
    truncation_direction: Literal["left", "right", "Left", "Right"] = Field(
        default="Right", description="The end that is cut."
    )

    @property
    def terms(self) -> RequestTerms:
        return RequestTerms()

    def truncation(self, facts: Facts) -> Truncation:
        keep = facts.max_text_len if self.truncate else None
        return Truncation(keep, left=self.truncation_direction.lower() == "left")


class PromptedTeiBody(TeiBody):
    prompt_name: Text | None = optional("The model's prompt that is written first, by name.")

    def prompt(self, task: Task, facts: Facts) -> str:
        """The instruction that is written before each text."""
        return find_prompt(self.prompt_name, facts)


class InputsBody(PromptedTeiBody):
    stand_ins = {"inputs": "-"}
    texts_field: ClassVar[str] = "inputs"
    client_names = {"input": "inputs"}

    inputs: SomeInputs = Field(description="A text or several, as strings or token ids.")

    @property
    def sources(self) -> list[Source]:
        return self.inputs or []


class EmbedRequest(InputsBody):
    normalize: Flag = True
    dimensions: int | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(task="embed", use_activation=self.normalize, dimensions=self.dimensions)


class EmbedAllRequest(InputsBody):
    dimensions: int | None = None

    def params(self) -> PoolingParams:
        return PoolingParams(
            task="token_embed", dimensions=self.dimensions, query=self.prompt_name in QUERIES
        )


class EmbedSparseRequest(InputsBody):
    def params(self) -> PoolingParams:
        return PoolingParams(task="sparse_embed", query=self.prompt_name in QUERIES)


Pair = tuple[str, str]


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and len(value) in (1, 2) and all(isinstance(one, str) for one in value)


def _predicted(value: object) -> str | Pair | list[str | Pair]:
    """Reads a text, a pair, or a list of lists with one or two texts each."""
    if isinstance(value, list) and len(value) > LIMITS.inputs:
        raise too_many("inputs", LIMITS.inputs, "texts", len(value))
    if isinstance(value, str) or _is_texts(value):
        return _text_or_pair(value)
    if isinstance(value, list) and value and all(_is_texts(one) for one in value):
        return [_text_or_pair(one) for one in value]
    raise PydanticCustomError(
        "inputs_type", "Input should be a text, a list of two texts, or a list of lists with one or two texts"
    )


def _text_or_pair(value: Any) -> str | Pair:
    texts = [check_text(text) for text in ([value] if isinstance(value, str) else value)]
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _as_sent(inputs: str | Pair | list[str | Pair]) -> object:
    """The inputs as a client sends them: in a list one text stands in a list, too."""
    return [[one] if isinstance(one, str) else one for one in inputs] if isinstance(inputs, list) else inputs


class PredictRequest(TeiBody):
    stand_ins = {"inputs": "-"}

    inputs: Annotated[
        str | Pair | list[str | Pair],
        PlainValidator(_predicted, json_schema_input_type=str | list[str] | list[list[str]]),
        PlainSerializer(_as_sent),
    ]
    raw_scores: Flag = False

    def options(self, facts: Facts) -> ScoreOptions:
        return ScoreOptions(
            use_activation=False if self.raw_scores else None, truncation=self.truncation(facts)
        )


class TextsRequest(TeiBody):
    """The body of /rerank in the form of text-embeddings-inference."""

    bounds = {"texts": (LIMITS.inputs, "texts")}
    stand_ins = {"query": "-", "texts": ["-"]}

    query: Text
    texts: Texts
    raw_scores: Flag = False
    return_text: Flag = False

    @property
    def repeats_documents(self) -> bool:
        """Whether the answer has the documents, too."""
        return self.return_text

    def pairs(self) -> Pairs:
        return Pairs([self.query], self.texts)

    def options(self, facts: Facts) -> ScoreOptions:
        return ScoreOptions(
            use_activation=False if self.raw_scores else None,
            truncation=self.truncation(facts),
            names=("query", "texts"),
        )

    def write(self, parts: RankedParts) -> list[RankedText]:
        return [RankedText(index, score, parts.document(index)) for index, score in parts.best]


class Sentences(Body):
    bounds = {"sentences": (LIMITS.inputs, "texts")}

    source_sentence: Text
    sentences: Annotated[Texts, Field(min_length=1)]


class SimilarityRequest(Body):
    stand_ins = {"inputs": {"source_sentence": "-", "sentences": ["-"]}}
    texts_field: ClassVar[str] = "sentences"

    inputs: Sentences
    parameters: PromptedTeiBody = PromptedTeiBody()

    @property
    def terms(self) -> RequestTerms:
        return self.parameters.terms

    @property
    def sources(self) -> list[Source]:
        """All sentences, the source sentence first."""
        return [self.inputs.source_sentence, *self.inputs.sentences]

    def params(self) -> PoolingParams:
        return PoolingParams(task="embed")

    def prompt(self, task: Task, facts: Facts) -> str:
        return self.parameters.prompt(task, facts)

    def truncation(self, facts: Facts) -> Truncation:
        return self.parameters.truncation(facts)


class RankedText(msgspec.Struct):
    index: int
    score: float
    text: msgspec.Raw | UnsetType = UNSET


class Prediction(msgspec.Struct):
    score: float
    label: str


class TeiTokenize(PromptedTeiBody):
    meaningless = frozenset({"model"})
    stand_ins = {"inputs": "-"}

    inputs: Text | Texts
    add_special_tokens: Flag = True

    @property
    def texts(self) -> list[str]:
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs


class DecodeRequest(TeiBody):
    meaningless = frozenset({"model"})
    stand_ins = {"ids": []}

    ids: Ids | Annotated[list[Ids], FIRST_ERROR]
    skip_special_tokens: Flag = True

    @property
    def lists(self) -> list[list[int]]:
        return cast("list[list[int]]", [self.ids] if is_ids(self.ids) else self.ids)
