"""Classes that make an embedder or a classifier of a model's class, or let a generating model pool as well.

Each composes the given class, which stays as it is, with a pooler. The trunk runs unchanged; of the LM head
only those rows are loaded that are needed, and for vectors none is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Any, ClassVar

import msgspec
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, family_fields
from models.conversion.conversion_choice import Conversion, stem
from models.layers.attention import CachedAttention
from models.layers.stages import if_held
from models.model import ModelSetup, stream_size
from models.pooling.config import PoolingConfig
from models.pooling.pooler import (
    ACTIVATIONS,
    Counted,
    Every,
    Function,
    Merged,
    Pooler,
    Rows,
    SparseWeights,
    Tagged,
    TaskHead,
    VocabularyLike,
    Weighed,
    normalize,
)
from models.pooling.projection import FileMatrix, Matrix, Projection
from models.pooling.representations import Splade, TokenVectors, TokenWeights
from models.pooling.sentence_files import Mode
from models.pooling.token_groups import reduce_tokens
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
            rows=_token_rows(pooling, tag=None),
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


def convert_class(cls: type, conversion: Conversion) -> type:
    """Make the class that serves as `conversion` says of `cls`, which `conversion.architecture` names."""
    name, family = cls.__name__, stem(cls.__name__)
    match conversion.runner, conversion.convert:
        case "generate", _:
            return _derive(_WithPooler, cls, f"{name}WithPooler")
        case _, "none" if conversion.architecture.endswith("ForRetrieval"):
            return _derive(_ForRetrieval, cls, conversion.architecture)
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


# The poolers of each kind of model, and the parts of which the head of each task is made.


def embedding_pooler(setup: ModelSetup, default: Mode, *, for_tokens: bool = True) -> Pooler:
    """A pooler that makes vectors of texts and, unless it is not `for_tokens`, of tokens.

    `default` is the family's pooling mode.
    """
    heads, projections = _embedding_heads(setup, default)
    if not for_tokens:
        heads.pop("token_embed", None)
    return Pooler(heads, projections)


def splade_pooler(setup: ModelSetup, head: VocabularyLike) -> Pooler:
    """A pooler that gives a text weights of the vocabulary, made of its tokens' logits."""
    form = setup.pooling.sparse
    assert isinstance(form, Splade)
    rows = Weighed(head, form)
    return Pooler({"sparse_embed": _sparse_head(setup, rows, None, setup.config.vocab_size)})


def label_pooler(
    setup: ModelSetup,
    classifier: Function,
    default: Mode,
    *,
    for_texts: bool = True,
    activates: bool = True,
    tag: int | None = None,
) -> Pooler:
    """A pooler that gives labels or scores to texts (unless the head is for tokens only) and to tokens.

    `classifier` turns rows [K, output_size] float32 into [K, labels], or into the logits of the tokens that
    stand for the labels. `default`, `activates` and `tag` are the family's defaults.
    """
    return Pooler(_label_heads(setup, classifier, default, for_texts, activates, tag))


def generating_pooler(setup: ModelSetup, classifier: Function | None, default: Mode) -> Pooler:
    """The pooler of a model that generates: it makes vectors, and labels if there is a classifier."""
    heads, projections = _embedding_heads(setup, default)
    if classifier is not None:
        heads |= _label_heads(setup, classifier, default, for_texts=True, activates=True, tag=None)
    return Pooler(heads, projections)


def _sparse_head(setup: ModelSetup, rows: Rows, project: Function | None, width: int) -> TaskHead:
    """The head of a text's weights, most of which are zero. No length is normal."""
    form, most = setup.pooling.sparse, setup.pooling.texts.max_active_dims
    without = form.without if isinstance(form, TokenWeights) else ()
    return TaskHead(
        rows=rows,
        project=project,
        width=width,
        activation=ACTIVATIONS["identity"],
        activates=False,
        sparse=SparseWeights(without, most),
    )


def _embedding_heads(setup: ModelSetup, default: Mode) -> tuple[dict[str, TaskHead], list[nn.Module]]:
    config = setup.pooling
    modes = config.modes or (default,)
    before = Projection(config.token_steps, setup.config.output_size, setup.folder, setup.load_format)
    after = Projection(config.steps, before.width * len(modes), setup.folder, setup.load_format)
    activates = config.normalize if config.use_activation is None else config.use_activation

    def head(rows: Rows, project: Projection | FileMatrix) -> TaskHead:
        return TaskHead(
            rows=rows,
            project=None if isinstance(project, Projection) and not project.steps else project,
            width=project.width,
            activation=normalize,
            activates=activates,
            dimensions=config.dimensions,
            before=before if before.steps else None,
        )

    # A token is one row: a projection of several rows side by side cannot follow.
    none = Projection((), before.width, setup.folder, setup.load_format)
    projections: list[nn.Module] = [before, after]
    if isinstance(config.sparse, Splade):
        raise ConfigError(
            f"SPLADE reads the head for masked tokens of an encoder, which {setup.config.architecture} is not"
        )
    if config.ends_sparse:
        return {"sparse_embed": _sparse_head(setup, Merged(modes), after, after.width)}, projections
    heads = {
        "embed": head(Merged(modes), after),
        "token_embed": _token_head(setup, head, after if len(modes) == 1 else none, projections),
    }
    if isinstance(config.sparse, TokenWeights):
        path, size = setup.folder / config.sparse.file, setup.config.output_size
        weigh = FileMatrix(path, size, setup.load_format, outputs=1)
        projections.append(weigh)
        heads["sparse_embed"] = _sparse_head(setup, Every(), lambda rows: weigh(rows).relu(), 1)
    return heads, projections


def _token_head(
    setup: ModelSetup,
    head: Callable[[Rows, Projection | FileMatrix], TaskHead],
    after: Projection,
    projections: list[nn.Module],
) -> TaskHead:
    """The head of tokens' vectors: by a layer of their own, if the checkpoint has one."""
    config, which = setup.pooling, setup.pooling.token_vectors
    rows = _token_rows(config, tag=None)
    if isinstance(rows, Every) and which != TokenVectors():
        rows = Counted(which)
    if not which.file:
        made = head(rows, after)
    else:
        own = FileMatrix(setup.folder / which.file, setup.config.output_size, setup.load_format)
        projections.append(own)
        made = head(rows, own)
    if which.pooling is None:
        return made
    return replace(made, reduce=partial(reduce_tokens, which))


def _label_heads(
    setup: ModelSetup, classifier: Function, default: Mode, for_texts: bool, activates: bool, tag: int | None
) -> dict[str, TaskHead]:
    config = setup.pooling
    modes = config.modes or (default,)
    if len(modes) > 1:
        raise ConfigError(f"a classifier reads one row for a text, not {' and '.join(modes)} side by side")

    def label(rows: Tensor) -> Tensor:
        logits = classifier(rows)  # [K, labels], or the logits of two tokens
        if config.two_way:
            logits = logits[:, 1:] - logits[:, :1]
        return (logits - config.logit_mean) / config.logit_sigma

    def head(rows: Rows) -> TaskHead:
        return TaskHead(
            rows=rows,
            project=label,
            width=config.num_labels,
            activation=ACTIVATIONS[config.activation],
            activates=activates if config.use_activation is None else config.use_activation,
        )

    heads = {"token_classify": head(_token_rows(config, tag))}
    if for_texts:
        heads["classify"] = head(Merged(modes))
    return heads


def _token_rows(config: PoolingConfig, tag: int | None) -> Rows:
    if (config.tokens or ("STEP" if tag is not None else "ALL")) == "ALL":
        return Every()
    tag = config.step_tag_id if config.step_tag_id is not None else tag
    if tag is None:
        raise ConfigError(
            "STEP pooling answers where one token stands: name it, "
            """as in --pooler-config '{"pooling_type": "STEP", "step_tag_id": 12902}'"""
        )
    return Tagged(tag)
