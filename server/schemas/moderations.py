"""The body and the answer of POST /v1/moderations, as OpenAI's API has them."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from pydantic import model_validator

from server.errors import BadRequest
from server.model_facts import Facts
from server.requests.labels.moderation import Verdict
from server.requests.pooling import PoolingParams, Source
from server.schemas.body import optional
from server.schemas.pooling_bodies import Inputs, PoolingBody
from worker.protocol import Task

OPENAI = (
    "omni-moderation-latest",
    "omni-moderation-2024-09-26",
    "text-moderation-latest",
    "text-moderation-stable",
)
"""Names of OpenAI's models, which programs send to whatever server they are told; here the served model."""


class ModerationRequest(PoolingBody):
    stand_ins = {"input": "-"}
    texts_field: ClassVar[str] = "input"

    input: Inputs = optional("A text, a list of texts, or the parts of one input, of which each is text.")

    @model_validator(mode="before")
    @classmethod
    def read_input(cls, body: object) -> object:
        """Joins the parts of an input, and takes OpenAI's names for the served model."""
        if not isinstance(body, dict):
            return body
        given: list[Any] = body["input"] if isinstance(body.get("input"), list) else []
        if body.get("model") in OPENAI:
            body = {**body, "model": None}
        if not given or not isinstance(given[0], dict):
            return body
        parts = [part for part in given if isinstance(part, dict)]
        texts = [text for part in parts if isinstance(text := part.get("text"), str)]
        if len(texts) < len(given):
            raise BadRequest("input: only parts of the type text are moderated here.", "input")
        return {**body, "input": "\n".join(texts)}

    @model_validator(mode="after")
    def check_input(self) -> ModerationRequest:
        if not self.input:
            raise BadRequest("`input` must not be empty: give at least one text.", "input")
        return self

    @property
    def sources(self) -> list[Source]:
        return self.input or []

    def params(self) -> PoolingParams:
        return PoolingParams(task="classify", use_activation=True)

    def prompt(self, task: Task, facts: Facts) -> str:
        return ""


class Moderations(msgspec.Struct):
    id: str
    model: str
    results: list[Verdict]
