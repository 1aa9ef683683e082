"""Drafters that are layers behind another model: they read its hidden states, and share its vocabulary.

Such a drafter reads the hidden state of a token together with the token that follows. What it keeps of the
two lies in the cache at the place of the latter, and turns by the position of the former. So place 0 has
nothing, and attention begins at place 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import Any, ClassVar

from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError
from models.families.decoders.decoder import Decoder, DecoderForCausalLM
from models.layers.attention import CachedAttention
from models.layers.rotary import Rope, Rotary
from models.model import ModelSetup


class DraftHead(nn.Module, ABC):
    method: ClassVar[str]
    """The name in `--speculative-config`."""
    causal = True

    def __init__(self, setup: ModelSetup, rope: Rope | None) -> None:
        super().__init__()
        self.width, self.dtype = setup.config.hidden_size, setup.dtype
        self._target = (find_decoder(setup, self.method),)  # the tuple hides what is no part of this
        self.rope = rope
        self.rotary = None if rope is None else Rotary(rope)

    @classmethod
    def begin_reading(cls, setup: ModelSetup) -> None:
        """Let the other model, of which this may be an earlier stage, give out the streams that are read."""
        trunk: Any = find_decoder(setup, cls.method).model
        trunk.given_out = cls.layers_read(setup, trunk.layers.count)

    @staticmethod
    def layers_read(setup: ModelSetup, count: int) -> tuple[int, ...]:
        """The layers of the other model, which has so many, whose incoming residual streams are read."""
        return ()

    @property
    def target(self) -> DecoderForCausalLM:
        """The model for which tokens are guessed."""
        return self._target[0]

    def read(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """What `forward` reads of the other model's tokens [T, width].

        hidden [T, H] are its last hidden states; each of `streams` [T, H] enters one of `layers_read`.
        """
        return hidden

    @abstractmethod
    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor) -> Tensor:
        """Tokens [T], and what is read of those before them [T, width] -> the same of these tokens.

        `positions` [T] are those of the tokens before. The first token of a text has none, and any result.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Results of `forward` [R, width] -> the logits of the tokens that follow [R, vocab_size] float32."""
        return self.target.logits(hidden)

    def embed(self, ids: Tensor) -> Tensor:
        trunk: Any = self.target.model
        return trunk.embed_tokens(ids)

    @property
    def embedding_width(self) -> int:
        trunk: Any = self.target.model
        return trunk.embed_tokens.size

    def pull_rotary(self, weights: Weights) -> None:
        if self.rotary is not None:
            load(self.rotary, weights)

    def rotations(self, positions: Tensor) -> dict[Rope, Tensor]:
        """The rotation of a step's tokens, as layers of decoders read it."""
        return {} if self.rotary is None or self.rope is None else {self.rope: self.rotary(positions)}

    def attention_layers(self) -> list[CachedAttention]:
        return [module for module in self.modules() if isinstance(module, CachedAttention)]


def spread(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Logits [R, N] of some tokens [N] -> of all [R, vocab_size]; those of others are -inf."""
    return logits.new_full((len(logits), vocab_size), -inf).index_copy_(1, tokens, logits)


def find_decoder(setup: ModelSetup, method: str) -> DecoderForCausalLM:
    """The model for which a drafter guesses, if it can give out its hidden states."""
    base: Any = getattr(setup.target, "base", setup.target)
    if not isinstance(base, DecoderForCausalLM) or not isinstance(base.model, Decoder):
        raise ConfigError(
            f"--speculative-config: {method} reads hidden states of decoders, and {type(base).__name__} "
            "gives out none: use draft_model, ngram or suffix"
        )
    return base
