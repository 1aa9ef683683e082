"""The pooling tasks of each kind of model, and the parts of which the head of each task is made."""

from __future__ import annotations

from torch import Tensor

from models.config import ConfigError
from models.model import ModelSetup
from models.pooling.config import PoolingConfig
from models.pooling.pooler import (
    ACTIVATIONS,
    Every,
    Function,
    Merged,
    Pooler,
    Rows,
    Tagged,
    TaskHead,
    normalize,
)
from models.pooling.projection import Projection
from models.pooling.sentence_files import Mode


def embedding_pooler(setup: ModelSetup, default: Mode) -> Pooler:
    """A pooler that makes vectors of texts and of tokens; `default` is the family's pooling mode."""
    heads, projections = _embedding_heads(setup, default)
    return Pooler(heads, projections)


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


def _embedding_heads(setup: ModelSetup, default: Mode) -> tuple[dict[str, TaskHead], list[Projection]]:
    config = setup.pooling
    modes = config.modes or (default,)
    before = Projection(config.token_steps, setup.config.output_size, setup.folder, setup.load_format)
    after = Projection(config.steps, before.width * len(modes), setup.folder, setup.load_format)
    activates = config.normalize if config.use_activation is None else config.use_activation

    def head(rows: Rows, project: Projection) -> TaskHead:
        return TaskHead(
            rows=rows,
            project=project if project.steps else None,
            width=project.width,
            activation=normalize,
            activates=activates,
            dimensions=config.dimensions,
            before=before if before.steps else None,
        )

    # A token is one row: a projection of several rows side by side cannot follow.
    none = Projection((), before.width, setup.folder, setup.load_format)
    heads = {
        "embed": head(Merged(modes), after),
        "token_embed": head(_token_rows(config, tag=None), after if len(modes) == 1 else none),
    }
    return heads, [before, after]


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
