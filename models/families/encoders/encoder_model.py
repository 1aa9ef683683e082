"""Classes of encoders as they are served: a trunk, and the head that it was published with, if it is of use.

A family has a class for each of its architectures, made by `encoder_classes`. The pooler merges tokens and
applies the head; it reads the attributes here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, family_fields
from models.layers.attention import Attention
from models.layers.embedding import Embedding, LMHead
from models.layers.linear import frozen
from models.layers.mlp import activation_kind
from models.layers.norm import LayerNorm
from models.model import ModelSetup
from models.pooling.projection import Matrix
from models.pooling.representations import Splade
from models.pooling.sentence_files import Mode


class EncoderModel(nn.Module):
    """A trunk and, if there is one, its head."""

    causal: ClassVar[bool] = False
    hides_tokens: ClassVar[bool] = True
    """Whether a text may have tokens that no other one sees."""
    default_pooling: Mode = "CLS"
    """The way tokens are merged if neither the checkpoint nor the operator says."""
    token_head: ClassVar[bool] = False
    """Whether the head is made for each token, and not for whole texts."""
    prefix: ClassVar[tuple[str, ...]]
    """The names that the trunk may have in a checkpoint. One that was saved without a head has no name."""
    heads: ClassVar[tuple[str, ...]]
    """The names of all heads in the family: a checkpoint may have more of them than are used."""

    def __init__(
        self,
        trunk: nn.Module,
        head: nn.Module | None = None,
        vocabulary: VocabularyHead | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head
        self.vocabulary = vocabulary

    def pull(self, weights: Weights) -> None:
        trunk = weights.first(*self.prefix, "")
        weights.ignore(*self.heads)
        trunk.ignore("pooler")
        load(self.trunk, trunk)
        for head in (self.head, self.vocabulary):
            if head is not None:
                load(head, weights)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        return self.trunk(ids, positions, stream)

    def attention_layers(self) -> list[Attention]:
        """Return no layers, since none reads the cache."""
        return []


def encoder_classes(
    family: str,
    trunk: Callable[[ModelSetup], nn.Module],
    head: Callable[[ModelSetup], nn.Module],
    *,
    prefix: tuple[str, ...],
    heads: tuple[str, ...],
    vocabulary: VocabularyNames | Callable[[ModelSetup], VocabularyNames] | None = None,
    hides_tokens: bool = True,
    token_head: Callable[[ModelSetup], Head] | None = None,
) -> tuple[type[EncoderModel], type[EncoderModel], type[EncoderModel]]:
    """A family's classes: its trunk alone, with `head` for whole texts, and with one for tokens.

    The first has the head for masked tokens, too, if SPLADE reads it. The last has a matrix, or `token_head`.
    """

    def derive(ending: str, head: Callable[[ModelSetup], nn.Module] | None, for_tokens: bool = False) -> Any:
        def build(self: EncoderModel, setup: ModelSetup) -> None:
            inner = trunk(setup)
            own = None if head is None else head(setup)
            named = vocabulary(setup) if callable(vocabulary) else vocabulary
            EncoderModel.__init__(self, inner, own, _splade_head(setup, named, inner, own))
            self.default_pooling = getattr(own or inner, "default_pooling", self.default_pooling)

        names = {"prefix": prefix, "heads": heads, "token_head": for_tokens, "hides_tokens": hides_tokens}
        members = {"__init__": build, "__module__": trunk.__module__, **names}
        return type(f"{family}{ending}", (EncoderModel,), members)

    return (
        derive("Model", None),
        derive("ForSequenceClassification", head),
        derive("ForTokenClassification", token_head or Head, for_tokens=True),
    )


def _splade_head(
    setup: ModelSetup, names: VocabularyNames | None, trunk: nn.Module, head: nn.Module | None
) -> VocabularyHead | None:
    reads = head is None and isinstance(setup.pooling.sparse, Splade)
    return VocabularyHead(setup, names, trunk) if reads else None


class Head(nn.Module):
    """Rows [R, hidden_size] -> [R, labels], in float32: a dense layer with an activation, and a classifier.

    `dense` has the names of which the dense layer has one in a checkpoint; if it is empty, there is none.
    `norm` is one between both, behind its name.
    """

    default_pooling: Mode = "CLS"
    """The way tokens are merged to the rows that it reads, if nobody says it."""

    def __init__(
        self,
        setup: ModelSetup,
        *,
        dense: tuple[str, ...] = (),
        dense_bias: bool = True,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        norm: tuple[str, nn.Module] = ("", nn.Identity()),
        out: str = "classifier",
    ) -> None:
        super().__init__()
        size = setup.config.hidden_size
        self.dense = Matrix(size, size, bias=dense_bias) if dense else None
        self.activation = activation
        self.out = Matrix(size, setup.pooling.num_labels, bias=True)
        self.norm_name, self.norm = norm
        self.dense_names, self.out_name = dense, out
        self.held = setup.parallel.last

    def pull(self, weights: Weights) -> None:
        if not self.held:  # `EncoderModel.pull` ignores the tensors of all heads
            return
        if self.dense is not None:
            load(self.dense, weights.first(*self.dense_names))
        load(self.norm, weights / self.norm_name)
        load(self.out, weights / self.out_name)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.float()
        if self.dense is not None:
            rows = self.activation(self.dense(rows))
        return self.out(self.norm(rows))


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


NAMED_GATES = {"swiglu": "silu", "geglu": "gelu"}
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
        return self.hidden_act if named is None else NAMED_GATES.get(named, named)

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
