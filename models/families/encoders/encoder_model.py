"""What an encoder is served as: its trunk, and the head that it was published with, if that answers requests.

A family derives a class for each of its architectures. How tokens are merged and where the head is applied is
the pooler's business, which reads the attributes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.layers.attention import Attention
from models.model import ModelSetup
from models.pooling.projection import Matrix
from models.pooling.sentence_files import Mode


class EncoderModel(nn.Module):
    causal: ClassVar[bool] = False
    default_pooling: Mode = "CLS"
    """How tokens are merged where neither the checkpoint nor the operator says."""
    token_head: ClassVar[bool] = False
    """The head is made for each token, and not for whole texts."""
    prefix: ClassVar[tuple[str, ...]]
    """What the trunk may be called in a checkpoint that was saved with a head. Without one it has no name."""
    heads: ClassVar[tuple[str, ...]]
    """The heads of all the family's architectures: a checkpoint may have more of them than are used."""

    def __init__(self, trunk: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def pull(self, weights: Weights) -> None:
        trunk = weights.first(*self.prefix, "")
        weights.ignore(*self.heads)
        trunk.ignore("pooler")
        load(self.trunk, trunk)
        if self.head is not None:
            load(self.head, weights)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        return self.trunk(ids, positions, stream)

    def attention_layers(self) -> list[Attention]:
        """None of them reads the cache."""
        return []


def encoder_classes(
    family: str,
    trunk: Callable[[ModelSetup], nn.Module],
    head: Callable[[ModelSetup], nn.Module],
    *,
    prefix: tuple[str, ...],
    heads: tuple[str, ...],
) -> tuple[type[EncoderModel], type[EncoderModel], type[EncoderModel]]:
    """A family's classes: its trunk alone, with `head` for whole texts, and with a matrix for tokens."""

    def derive(ending: str, head: Callable[[ModelSetup], nn.Module] | None, token_head: bool = False) -> Any:
        def build(self: EncoderModel, setup: ModelSetup) -> None:
            EncoderModel.__init__(self, trunk(setup), None if head is None else head(setup))

        names = {"prefix": prefix, "heads": heads, "token_head": token_head}
        members = {"__init__": build, "__module__": trunk.__module__, **names}
        return type(f"{family}{ending}", (EncoderModel,), members)

    return (
        derive("Model", None),
        derive("ForSequenceClassification", head),
        derive("ForTokenClassification", Head, token_head=True),
    )


class Head(nn.Module):
    """Rows [R, hidden_size] -> [R, labels], in float32: a dense layer with an activation, and a classifier.

    A part may have one of several names in a checkpoint; without a name for `dense` there is none.
    """

    def __init__(
        self,
        setup: ModelSetup,
        *,
        dense: tuple[str, ...] = (),
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        out: str = "classifier",
    ) -> None:
        super().__init__()
        size = setup.config.hidden_size
        self.dense = Matrix(size, size, bias=True) if dense else None
        self.activation = activation
        self.out = Matrix(size, setup.pooling.num_labels, bias=True)
        self.dense_names, self.out_name = dense, out
        self.held = setup.parallel.last

    def pull(self, weights: Weights) -> None:
        if not self.held:  # the model ignores what its heads are called
            return
        if self.dense is not None:
            load(self.dense, weights.first(*self.dense_names))
        load(self.out, weights / self.out_name)

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.float()
        if self.dense is not None:
            rows = self.activation(self.dense(rows))
        return self.out(rows)
