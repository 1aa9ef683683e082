"""The interface through which a transcription calls a model, whoever runs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec
import numpy as np


class Piece(msgspec.Struct, frozen=True):
    """A piece of the recording, in frames. Behind its end the model reads silence."""

    first: int
    frames: int


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling of a piece's tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 0
    only: tuple[int, ...] = ()
    """The only tokens that may be drawn; none: all that the rules of timestamps allow."""
    told: tuple[int, ...] = ()
    """Tokens whose probabilities are told with each that is drawn."""


class Drawn(msgspec.Struct, frozen=True):
    """A token, its logprob among those that were allowed, and the logprobs of tokens that are told."""

    token: int
    logprob: float = 0.0
    told: tuple[float, ...] = ()


class SpeechText(Protocol):
    """Makes text of tokens that come one by one."""

    def push(self, tokens: Sequence[int], /) -> str: ...

    def flush(self) -> str: ...


class SpeechEngine(Protocol):
    """A model that reads pieces of one recording."""

    def draw(self, prompt: list[int], how: Draw, piece: Piece) -> AsyncGenerator[list[Drawn], None]:
        """Draws tokens behind a prompt, the end among them. Closing the generator ends it."""
        ...

    async def align(self, tokens: list[int], skip: int, piece: Piece, columns: int) -> np.ndarray:
        """How much the tokens behind the first ones attend to the first columns of a piece [tokens - skip,
        columns], of which there is one for each 20 ms."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def text(self) -> SpeechText: ...
