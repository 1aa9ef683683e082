"""Functions that make an embedder or a classifier of a model's class, or let a generating model pool as well.

Each composes the given class, which stays as it is, with a pooler. The trunk runs unchanged; of the LM head
only those rows are loaded that are needed, and for vectors none is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.conversion.served_as import Conversion, stem
from models.conversion.task_heads import embedding_pooler, generating_pooler, label_pooler
from models.layers.attention import CachedAttention
from models.layers.stages import if_held
from models.model import ModelSetup
from models.pooling.pooler import Pooler
from models.pooling.projection import Matrix
from models.pooling.sentence_files import Mode
from models.weight_pieces import WeightsError


class PoolingModel(nn.Module):
    """A model that pools: it consists of the model it is made of, and of a pooler for the hidden states.

    Every stage has the pooler, to know which tasks there are; its tensors are in the last stage.
    """

    is_pooling_model: ClassVar[bool] = True
    base_class: ClassVar[type]
    pooler: Pooler

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        self.base: Any = self.base_class(setup)
        self.last = setup.parallel.last
        self.causal: bool = getattr(self.base, "causal", True)
        self.default_mode: Mode = getattr(self.base, "default_pooling", "LAST")

    def pull(self, weights: Weights) -> None:
        load(self.base, weights)
        if self.last:
            load(self.pooler, weights)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        # Classes of other distributions need not take a `stream`.
        return self.base(ids, positions) if stream is None else self.base(ids, positions, stream)

    def attention_layers(self) -> Sequence[CachedAttention]:
        return self.base.attention_layers()


class _Native(PoolingModel):
    """An encoder, with the head it was published with, if any."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        if getattr(self.base, "head", None) is None:
            self.pooler = embedding_pooler(setup, self.default_mode)
        else:
            self.pooler = label_pooler(
                setup, self.base.head, self.default_mode, for_texts=not self.base.token_head
            )


class _ForEmbedding(PoolingModel):
    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(replace(setup, head_tokens=()))
        self.pooler = embedding_pooler(setup, self.default_mode)

    def pull(self, weights: Weights) -> None:
        weights.ignore("score")  # the head of a classifier: its trunk can embed as well
        super().pull(weights)


class _WithTokenLogits(PoolingModel):
    """A model whose labels may be tokens of the vocabulary."""

    def pull(self, weights: Weights) -> None:
        self.dtype = weights.dtype
        super().pull(weights)

    def token_logits(self, rows: Tensor) -> Tensor:
        return self.base.logits(rows.to(self.dtype))


class _ForClassification(_WithTokenLogits):
    """A classifier, by the checkpoint's matrix `score` or by the logits of a few tokens."""

    for_texts: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup) -> None:
        tokens = setup.pooling.classifier_tokens
        super().__init__(replace(setup, head_tokens=tokens))
        size, labels = setup.config.output_size, setup.pooling.num_labels
        self.score = None if tokens else if_held(self.last, Matrix(size, labels, bias=None))
        classifier = self.score or self.token_logits
        self.pooler = label_pooler(setup, classifier, self.default_mode, for_texts=self.for_texts)

    def pull(self, weights: Weights) -> None:
        if self.score is None:
            weights.ignore("score")
        elif weights.reading.names and "score.weight" not in weights:  # dummy weights have no names
            raise WeightsError(_NO_CLASSIFIER)
        super().pull(weights)
        if self.score is not None:
            load(self.score, weights / "score")


class _ForTokenClassification(_ForClassification):
    for_texts: ClassVar[bool] = False


class _WithPooler(_WithTokenLogits):
    """A model that generates and pools: to vectors, and to labels if they are tokens of the vocabulary."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        self.labels = list(setup.pooling.classifier_tokens)
        classifier = self._label_logits if self.labels else None
        self.pooler = generating_pooler(setup, classifier, self.default_mode)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.base.logits(hidden)

    def _label_logits(self, rows: Tensor) -> Tensor:
        return self.token_logits(rows)[:, self.labels]


# The log shows its first 190 characters or so: they are a whole remedy.
_NO_CLASSIFIER = (
    "the checkpoint has no classifier (score.weight): use --convert embed, or classify by tokens: "
    """--hf-overrides '{"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}' """
    "gives the probability of the second by their logits, "
    """and '{"classifier_from_token": ["a", "b"], "method": "no_post_processing"}' one label for each. """
    "Rewards need a model that was trained to give them: its own architecture (...ForRewardModel) is served "
    "without --convert."
)


def adapt(cls: type, conversion: Conversion) -> type:
    """Make the class that serves as `conversion` says of `cls`, which `conversion.architecture` names."""
    match conversion.runner, conversion.convert:
        case "generate", _:
            return with_pooler(cls)
        case _, "none":
            return as_pooling_model(cls)
        case _, "embed":
            return as_embedding_model(cls)
        case _:
            return as_token_cls_model(cls) if conversion.labels_tokens else as_seq_cls_model(cls)


@cache
def as_pooling_model(cls: type) -> type:
    """Add the pooler that an encoder was made for."""
    return _derive(_Native, cls, cls.__name__)


@cache
def as_embedding_model(cls: type) -> type:
    return _derive(_ForEmbedding, cls, f"{stem(cls.__name__)}ForEmbedding")


@cache
def as_seq_cls_model(cls: type) -> type:
    return _derive(_ForClassification, cls, f"{stem(cls.__name__)}ForSequenceClassification")


@cache
def as_token_cls_model(cls: type) -> type:
    return _derive(_ForTokenClassification, cls, f"{stem(cls.__name__)}ForTokenClassification")


@cache
def with_pooler(cls: type) -> type:
    """Let a model that generates pool as well, with the same weights."""
    return _derive(_WithPooler, cls, f"{cls.__name__}WithPooler")


def _derive(kind: type[PoolingModel], cls: type, name: str) -> type:
    """Make a subclass of `kind` around `cls`. A class that pools already stays as it is."""
    if getattr(cls, "is_pooling_model", False):
        return cls
    return type(name, (kind,), {"base_class": cls, "__module__": cls.__module__})
