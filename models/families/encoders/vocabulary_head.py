"""The head with which encoders guess masked tokens: SPLADE makes weights of its logits."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, family_fields
from models.layers.embedding import Embedding, LMHead
from models.layers.linear import frozen
from models.layers.mlp import activation_kind
from models.layers.norm import LayerNorm
from models.model import ModelSetup
from models.pooling.projection import Matrix


@dataclass(frozen=True, kw_only=True)
class VocabularyNames:
    """The names of the head's parts in a family's checkpoints, and what config.json does not say of them."""

    dense: str
    norm: str
    decoder: str
    bias: str
    activation: str | None = None
    """None: that of config.json."""
    eps: float | None = None
    dense_bias: bool = True
    norm_bias: bool = True


BERT_NAMES = VocabularyNames(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    bias="cls.predictions.bias",
)
ROBERTA_NAMES = VocabularyNames(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    bias="lm_head.bias",
    activation="gelu",
)


class _Fields(msgspec.Struct, frozen=True):
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12


class VocabularyHead(nn.Module):
    """Hidden states [R, H] -> logits of the vocabulary [R, V] float32, to which `bias` [V] is to be added."""

    bias: nn.Parameter

    def __init__(self, setup: ModelSetup, names: VocabularyNames | None, trunk: nn.Module) -> None:
        super().__init__()
        config, parallel, fields = setup.config, setup.parallel, family_fields(setup.config, _Fields)
        if names is None:
            raise ConfigError(
                f"SPLADE needs a head for masked tokens, and none is served for {config.architecture}: there "
                "are those of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet and ModernBERT"
            )
        if parallel.size > 1 or not (parallel.first and parallel.last):
            raise ConfigError("SPLADE's head for masked tokens is not cut: serve the model with one rank")
        embedding = next(part for part in trunk.modules() if isinstance(part, Embedding))
        self.names, self.vocab_size = names, config.vocab_size
        self.dense = Matrix(config.hidden_size, embedding.size, bias=names.dense_bias)
        eps = fields.layer_norm_eps if names.eps is None else names.eps
        self.norm = LayerNorm(embedding.size, eps, bias=names.norm_bias, dtype=torch.float32)
        self.kind = activation_kind(names.activation or fields.hidden_act)
        self.decoder = LMHead(config.vocab_size, embedding.size, parallel, embedding=embedding, tied=None)

    def pull(self, weights: Weights) -> None:
        self.dtype = weights.dtype
        load(self.dense, weights / self.names.dense)
        load(self.norm, weights / self.names.norm)
        load(self.decoder, weights / self.names.decoder)
        scope, _, name = self.names.bias.rpartition(".")
        self.bias = frozen((weights / scope).take(name, [self.vocab_size], dtype=torch.float32))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.norm(ops.activation(self.dense(rows.float()), self.kind))
        return self.decoder(hidden.to(self.dtype))
