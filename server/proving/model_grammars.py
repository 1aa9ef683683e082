"""Grammars of answers: each is proved before an engine sees it, and engines learn how tokens are spelled."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from engine_core.client.client import EngineClient
from server.answers.finding import format_of
from server.grammars.building import Built
from server.grammars.engine_grammar import spelling_of
from server.model_facts import Facts
from server.options.server_config import ServerConfig
from server.proving.prover import Prover
from server.proving.prover_process import Question
from server.text.tokenizer import Tokenizer


class Model(Protocol):
    """What is asked of a frontend, when its model is ready."""

    @property
    def facts(self) -> Facts: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class Grammars:
    def __init__(self, model: Model, client: EngineClient, config: ServerConfig) -> None:
        self._model = model
        self._client = client
        self._config = config
        self._prover = Prover(self._special_tokens, log_level=config.log.uvicorn_log_level)
        self._spelled: Tokenizer | None = None

    async def prove(self, asked: Question) -> Built:
        """The grammar of what is asked. Raises the error with which the request ends."""
        if self._spelled is self._model.tokenizer:
            return await self._prover.prove(asked)
        # With the first grammar and not before. In a thread, as a large vocabulary takes half a second.
        tokenizer, facts = self._model.tokenizer, self._model.facts
        work = asyncio.to_thread(spelling_of, tokenizer, facts, self._marks())
        built, spelling = await asyncio.gather(self._prover.prove(asked), work)
        self._client.spell(spelling)
        self._spelled = tokenizer
        return built

    def stop(self) -> None:
        """End the process that proves grammars."""
        self._prover.kill()

    def _special_tokens(self) -> dict[str, int]:
        """The tokens that are no text, by their names."""
        tokenizer = self._model.tokenizer
        special = tokenizer.special_ids | self._marks().keys()
        return {name: id for name, id in tokenizer.added_tokens.items() if id in special}

    def _marks(self) -> Mapping[int, str]:
        config = self._config
        return format_of(self._model.tokenizer, config.tool_call_parser, config.reasoning_parser).marks
