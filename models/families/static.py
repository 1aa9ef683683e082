"""Static vectors: a vector for each token of the vocabulary, which no other token changes."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.config import Size, family_fields
from models.layers.attention import Attention
from models.layers.linear import frozen
from models.model import ModelSetup
from models.pooling.sentence_files import Mode


class StaticFields(msgspec.Struct, frozen=True):
    rows: Size
    """The vectors that are stored: several tokens may share one."""


class StaticModel(nn.Module):
    causal = False
    default_pooling: Mode = "MEAN"
    table: nn.Parameter  # [vocab_size, hidden_size]

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        config = setup.config
        self.size, self.vocab_size = config.hidden_size, config.vocab_size
        self.rows = family_fields(config, StaticFields).rows

    def pull(self, weights: Weights) -> None:
        if "embedding.weight" in weights or not weights.reading.names:
            self.table = frozen(weights.take("embedding.weight", [self.vocab_size, self.size]))
            return
        table = weights.take("embeddings", [self.rows, self.size])
        if "mapping" in weights:
            table = table[weights.stored("mapping", [self.vocab_size], ("int64", "int32")).long()]
        if "weights" in weights:
            factors = weights.take("weights", [self.vocab_size], dtype=torch.float32)
            table = (table.float() * factors[:, None]).to(table.dtype)
        self.table = frozen(table)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        return ops.embed(ids, self.table)

    def attention_layers(self) -> list[Attention]:
        """Return no layers, since no token sees another."""
        return []
