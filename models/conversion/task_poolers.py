"""The poolers of each kind of model, and the parts of which the head of each task is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from models.config import ConfigError
from models.model import ModelSetup
from models.pooling.config import PoolingConfig
from models.pooling.projection import FileMatrix, Projection
from models.pooling.representations import Splade, TokenVectors, TokenWeights
from models.pooling.sentence_files import Mode
from models.pooling.task_heads import (
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
from models.pooling.token_groups import reduce_tokens


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
    rows = token_rows(config, tag=None)
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

    heads = {"token_classify": head(token_rows(config, tag))}
    if for_texts:
        heads["classify"] = head(Merged(modes))
    return heads


def token_rows(config: PoolingConfig, tag: int | None) -> Rows:
    if (config.tokens or ("STEP" if tag is not None else "ALL")) == "ALL":
        return Every()
    tag = config.step_tag_id if config.step_tag_id is not None else tag
    if tag is None:
        raise ConfigError(
            "STEP pooling answers where one token stands: name it, "
            """as in --pooler-config '{"pooling_type": "STEP", "step_tag_id": 12902}'"""
        )
    return Tagged(tag)
