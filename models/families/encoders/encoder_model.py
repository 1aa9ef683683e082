"""Classes of encoders as they are served: a trunk, and the head that it was published with, if it is of use.

A family has a class for each of its architectures, made by `encoder_classes`. The pooler merges tokens and
applies the head; it reads the attributes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.families.encoders.vocabulary_head import VocabularyHead, VocabularyNames
from models.layers.attention import Attention
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
    vocabulary: VocabularyNames | None = None,
    hides_tokens: bool = True,
) -> tuple[type[EncoderModel], type[EncoderModel], type[EncoderModel]]:
    """A family's classes: its trunk alone, with `head` for whole texts, and with a matrix for tokens.

    The first has the head for masked tokens, too, if SPLADE reads it.
    """

    def derive(ending: str, head: Callable[[ModelSetup], nn.Module] | None, token_head: bool = False) -> Any:
        def build(self: EncoderModel, setup: ModelSetup) -> None:
            inner = trunk(setup)
            own = None if head is None else head(setup)
            EncoderModel.__init__(self, inner, own, _splade_head(setup, vocabulary, inner, own))
            if head is None:
                self.default_pooling = getattr(inner, "default_pooling", self.default_pooling)

        names = {"prefix": prefix, "heads": heads, "token_head": token_head, "hides_tokens": hides_tokens}
        members = {"__init__": build, "__module__": trunk.__module__, **names}
        return type(f"{family}{ending}", (EncoderModel,), members)

    return (
        derive("Model", None),
        derive("ForSequenceClassification", head),
        derive("ForTokenClassification", Head, token_head=True),
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
