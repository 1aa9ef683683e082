"""Grammars of answers: each is proved before an engine sees it, and engines learn how tokens are spelled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from engine_core.client.client import EngineClient
from engine_core.protocol import Grammar, Spelling
from server.answers.finding import format_of
from server.offload.prover import Prover
from server.offload.proving import Question
from server.options.table import ServerConfig
from server.requests.facts import Facts
from server.structured.building import Built
from server.text.tokenizer import Tokenizer


class Model(Protocol):
    """What is asked of a frontend, when its model is ready."""

    @property
    def folder(self) -> Path: ...

    @property
    def facts(self) -> Facts: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class Grammars:
    def __init__(self, model: Model, client: EngineClient, config: ServerConfig) -> None:
        self._model = model
        self._client = client
        self._config = config
        self._prover = Prover(lambda: model.tokenizer.added_tokens, log_level=config.uvicorn_log_level)
        self._spelled: Tokenizer | None = None

    async def prove(self, asked: Question) -> Built:
        """The grammar of what is asked. Raises the error with which the request ends."""
        built = await self._prover.prove(asked)
        if self._spelled is not self._model.tokenizer:  # with the first grammar and not before
            self._spelled = self._model.tokenizer
            self._client.spell(spelling_of(self._model, self._marks()))
        return built

    def _marks(self) -> Mapping[int, str]:
        config = self._config
        return format_of(self._model.tokenizer, config.tool_call_parser, config.reasoning_parser).marks


def as_grammar(built: Built) -> Grammar:
    """What the engine is told."""
    return Grammar(built.kind, built.text, built.wakes, built.again)


def spelling_of(model: Model, marks: Mapping[int, str]) -> Spelling:
    """How the tokens of a model are spelled. Those of markup are no text, whatever the tokenizer says."""
    tokenizer = model.tokenizer
    return Spelling(
        tokens=[tokenizer.token_bytes(id) for id in range(tokenizer.largest_id + 1)],
        special=sorted({*tokenizer.special_ids, *marks}),
        ends=list(model.facts.eos_token_ids),
        tokenizer=str(model.folder / "tokenizer.json"),
    )
