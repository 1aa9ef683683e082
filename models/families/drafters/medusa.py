"""Medusa: heads that each guess one token, at their own distance from the last hidden state."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import family_fields
from models.families.drafters.head import find_decoder, spread
from models.layers.attention import CachedAttention
from models.layers.embedding import LMHead
from models.layers.linear import Linear
from models.medusa_config import MedusaFields
from models.model import ModelSetup


class Medusa(nn.Module):
    """No head reads what another one guesses, and none keeps anything in the cache."""

    method: ClassVar[str] = "medusa"
    causal = True
    tokens: Tensor | None = None  # [truncated_vocab_size] int64: the token of each logit; None: its own

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        config, fields = setup.config, family_fields(setup.config, MedusaFields)
        size, self.vocab_size = config.hidden_size, config.vocab_size
        self._count, self._layers = fields.truncated_vocab_size or config.vocab_size, fields.num_hidden_layers
        trunk: Any = find_decoder(setup, self.method).model
        self.blocks: Any = nn.ModuleList(
            nn.ModuleList(Linear(size, size, activation="silu") for _ in range(self._layers))
            for _ in range(fields.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            LMHead(self._count, size, setup.parallel, embedding=trunk.embed_tokens, tied=False)
            for _ in range(1 if fields.original_lm_head else fields.num_heads)
        )

    def pull(self, weights: Weights) -> None:
        """Read the heads under the authors' names, or under those of files converted for vLLM."""
        trunk = weights.first("medusa_heads", "medusa_head", "")
        blocks = trunk.first("blocks", "")
        is_converted = blocks.path != trunk.path
        for number, layers in enumerate(self.blocks):
            for at, layer in enumerate(layers):
                scope = blocks / (f"{number}.layers.{at}" if is_converted else f"{number}.{at}.linear")
                layer.has_bias = "bias" in scope
                load(layer, scope)
        for number, head in enumerate(self.lm_heads):
            load(head, trunk / (f"lm_heads.{number}" if is_converted else f"{number}.{self._layers}"))
        if self._count < self.vocab_size:
            self.tokens = torch.arange(self._count, device=weights.device)
            if weights.is_real:
                self.tokens = weights.stored("token_map", [self._count], ("int64", "int32")).long()
        else:
            weights.ignore("token_map")

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """Last hidden states [R, H] -> the logits [R, vocab_size] float32 of tokens at a head's distance.

        A hidden state says which token comes next. Head 0 guesses the one behind that.
        """
        for layer in self.blocks[head]:
            hidden = ops.add(hidden, layer(hidden))
        logits = self.lm_heads[min(head, len(self.lm_heads) - 1)](hidden)
        return logits if self.tokens is None else spread(logits, self.tokens, self.vocab_size)

    def attention_layers(self) -> list[CachedAttention]:
        return []
