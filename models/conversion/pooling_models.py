"""Classes that make an embedder or a classifier of a model's class, or let a generating model pool as well.

Each composes the given class, which stays as it is, with a pooler. The trunk runs unchanged; of the LM head
only those rows are loaded that are needed, and for vectors none is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, ClassVar

import msgspec
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, family_fields
from models.conversion.conversion_choice import Conversion, stem
from models.conversion.task_poolers import (
    embedding_pooler,
    generating_pooler,
    label_pooler,
    splade_pooler,
    token_rows,
)
from models.layers.attention import CachedAttention
from models.layers.stages import if_held
from models.model import ModelSetup, stream_size
from models.pooling.projection import Matrix
from models.pooling.sentence_files import Mode
from models.pooling.task_heads import (
    Pooler,
    TaskHead,
    normalize,
)
from models.weight_slices import WeightsError


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
        self._hidden_size = setup.config.hidden_size
        self.default_mode: Mode = getattr(self.base, "default_pooling", "LAST")
        expansion = setup.pooling.texts.expansion
        if expansion is not None and not expansion.attends and not getattr(self.base, "hides_tokens", False):
            raise ConfigError(
                f"the files of this {setup.config.architecture} fill queries up with tokens that no other "
                "one sees ('attend' false of 'query_expansion'), which encoders only can do"
            )

    @property
    def stream_size(self) -> int:
        return stream_size(self.base, self._hidden_size)

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
        if getattr(self.base, "vocabulary", None) is not None:
            self.pooler = splade_pooler(setup, self.base.vocabulary)
        elif getattr(self.base, "head", None) is None:
            for_tokens = getattr(self.base, "has_token_rows", True)
            self.pooler = embedding_pooler(setup, self.default_mode, for_tokens=for_tokens)
        else:
            self.pooler = label_pooler(
                setup, self.base.head, self.default_mode, for_texts=not self.base.token_head
            )


class _RetrievalFields(msgspec.Struct, frozen=True):
    embedding_dim: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 128


class _ForRetrieval(PoolingModel):
    """A model of text and pictures that gives each token of a query or of a page a narrow vector."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(replace(setup, head_tokens=()))
        config, pooling = setup.config, setup.pooling
        whole = msgspec.structs.replace(config, raw=config.whole or config.raw)
        width = family_fields(whole, _RetrievalFields).embedding_dim
        self.embedding_proj_layer = if_held(self.last, Matrix(config.output_size, width, bias=True))
        head = TaskHead(
            rows=token_rows(pooling, tag=None),
            project=self.embedding_proj_layer,
            width=width,
            activation=normalize,
            activates=pooling.use_activation is not False,
            dimensions=pooling.dimensions,
        )
        self.pooler = Pooler({"token_embed": head})

    def pull(self, weights: Weights) -> None:
        super().pull(weights / "vlm")
        if self.embedding_proj_layer is not None:
            load(self.embedding_proj_layer, weights / "embedding_proj_layer")


class _ForRanking(PoolingModel):
    """A reranker of texts and pictures, which scores a pair by two layers over its last token."""

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(replace(setup, head_tokens=()))
        size, labels = setup.config.output_size, setup.pooling.num_labels
        self.dense = if_held(self.last, Matrix(size, size, bias=True))
        self.score = if_held(self.last, Matrix(size, labels, bias=True))
        self.pooler = label_pooler(setup, self._label, self.default_mode)

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        if self.dense is None or self.score is None:
            weights.ignore("score")
        else:
            load(self.dense, weights / "score.0")
            load(self.score, weights / "score.2")

    def _label(self, rows: Tensor) -> Tensor:
        assert self.dense is not None and self.score is not None
        return self.score(self.dense(rows).relu())


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

    logits: Callable[[Tensor], Tensor]

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        self.logits = self.base.logits
        self.labels = list(setup.pooling.classifier_tokens)
        classifier = self._label_logits if self.labels else None
        self.pooler = generating_pooler(setup, classifier, self.default_mode)

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


def convert_class(cls: type, conversion: Conversion) -> type:
    """Make the class that serves as `conversion` says of `cls`, which `conversion.architecture` names."""
    name, family = cls.__name__, stem(cls.__name__)
    match conversion.runner, conversion.convert:
        case "generate", _:
            return _derive(_WithPooler, cls, f"{name}WithPooler")
        case _, "none" if conversion.architecture.endswith("ForRetrieval"):
            return _derive(_ForRetrieval, cls, conversion.architecture)
        case _, "none" if conversion.architecture.endswith("ForRanking"):
            return _derive(_ForRanking, cls, conversion.architecture)
        case _, "none":
            return _derive(_Native, cls, name)
        case _, "embed":
            return _derive(_ForEmbedding, cls, f"{family}ForEmbedding")
        case _ if conversion.labels_tokens:
            return _derive(_ForTokenClassification, cls, f"{family}ForTokenClassification")
        case _:
            return _derive(_ForClassification, cls, f"{family}ForSequenceClassification")


@cache
def _derive(kind: type[PoolingModel], cls: type, name: str) -> type:
    """Make a subclass of `kind` around `cls`. A class that pools already stays as it is."""
    if getattr(cls, "is_pooling_model", False):
        return cls
    return type(name, (kind,), {"base_class": cls, "__module__": cls.__module__})
