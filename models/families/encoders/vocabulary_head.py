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
    norm: tuple[str, ...]
    """The names of which the norm has one."""
    decoder: str
    bias: tuple[str, ...]
    """The names of which the bias of the vocabulary has one."""
    activation: str | None = None
    """None: that of config.json."""
    eps: float | None = None
    dense_bias: bool | None = True
    """None: as the checkpoint has it."""
    norm_bias: bool = True
    has_bias: bool = True
    """Whether all checkpoints have a bias of the vocabulary."""


BERT_NAMES = VocabularyNames(
    dense="cls.predictions.transform.dense",
    norm=("cls.predictions.transform.LayerNorm", "cls.predictions.transform.layer_norm"),
    decoder="cls.predictions.decoder",
    bias=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
ROBERTA_NAMES = VocabularyNames(
    dense="lm_head.dense",
    norm=("lm_head.layer_norm", "lm_head.norm"),
    decoder="lm_head.decoder",
    bias=("lm_head.bias", "lm_head.decoder.bias"),
    activation="gelu",
)


_GATES = {"swiglu": "silu", "geglu": "gelu"}
"""The activations that stand in the place of gates, by Nomic's names."""


class _Fields(msgspec.Struct, frozen=True):
    """The activation and the number of norms, by usual names and by Nomic's."""

    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    activation_function: str | None = None
    layer_norm_epsilon: float | None = None

    @property
    def activation(self) -> str:
        named = self.activation_function
        return self.hidden_act if named is None else _GATES.get(named, named)

    @property
    def eps(self) -> float:
        return self.layer_norm_eps if self.layer_norm_epsilon is None else self.layer_norm_epsilon


class VocabularyHead(nn.Module):
    """Hidden states [R, H] -> logits of the vocabulary [R, V] float32, to which `bias` [V] is to be added."""

    bias: nn.Parameter

    def __init__(self, setup: ModelSetup, names: VocabularyNames | None, trunk: nn.Module) -> None:
        super().__init__()
        config, parallel, fields = setup.config, setup.parallel, family_fields(setup.config, _Fields)
        if names is None:
            raise ConfigError(
                f"SPLADE needs a head for masked tokens, and none is served for {config.architecture}: there "
                "are those of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet, ModernBERT, ALBERT, "
                "GTE, NomicBERT, JinaBERT and DeBERTa"
            )
        if parallel.size > 1 or not (parallel.first and parallel.last):
            raise ConfigError("SPLADE's head for masked tokens is not cut: serve the model with one rank")
        embedding = next(part for part in trunk.modules() if isinstance(part, Embedding))
        self.names, self.vocab_size = names, config.vocab_size
        self.dense = Matrix(config.hidden_size, embedding.size, bias=names.dense_bias)
        eps = fields.eps if names.eps is None else names.eps
        self.norm = LayerNorm(embedding.size, eps, bias=names.norm_bias, dtype=torch.float32)
        self.kind = activation_kind(names.activation or fields.activation)
        self.decoder = LMHead(config.vocab_size, embedding.size, parallel, embedding=embedding, tied=None)

    def pull(self, weights: Weights) -> None:
        self.dtype = weights.dtype
        load(self.dense, weights / self.names.dense)
        load(self.norm, weights.first(*self.names.norm))
        load(self.decoder, weights / self.names.decoder)
        self.bias = frozen(self._read_bias(weights))

    def _read_bias(self, weights: Weights) -> Tensor:
        found = next((name for name in self.names.bias if name in weights), self.names.bias[0])
        if found not in weights and not self.names.has_bias and weights.reading.names:
            return torch.zeros(self.vocab_size, device=weights.device)
        return weights.take(found, [self.vocab_size], dtype=torch.float32)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.norm(ops.activation(self.dense(rows.float()), self.kind))
        return self.decoder(hidden.to(self.dtype))
