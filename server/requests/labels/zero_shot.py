"""Classes that a request names, by a model that tells whether a text entails a sentence.

Each text is read with a sentence for each label; the probabilities are those of transformers' pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from server.errors import BadRequest, too_many
from server.model_facts import Facts
from server.requests.pooling import Item, PoolingParams, Source, Truncation
from server.requests.scoring import texts_and_pairs
from server.requests.vectors import as_array
from server.text.tokenizer import Tokenizer
from worker.protocol import Vectors

TEMPLATE = "This example is {}."


def entailment_of(facts: Facts) -> int:
    """The index of the label for what a text entails. Raises BadRequest if the model has none."""
    labels = facts.pooling.labels
    found = [index for index, label in enumerate(labels) if label.lower().startswith("entail")]
    if not found:
        named = ", ".join(labels[:8]) or "without names"
        raise BadRequest(
            "`labels` are for models that compare pictures with texts, and for those that tell whether a "
            f"text entails a sentence, with a label 'entailment'; this one has labels of its own: {named}.",
            "labels",
        )
    return found[0]


def read_labelled(
    sources: Sequence[Source],
    labels: Sequence[str],
    template: str,
    truncation: Truncation,
    facts: Facts,
    tokenizer: Tokenizer,
) -> list[Item]:
    """The items of each text with the sentence of each label."""
    entailment_of(facts)
    if "{}" not in template:
        raise BadRequest("`hypothesis_template` needs a place for the label: {}.", "hypothesis_template")
    texts = [source for source in sources if isinstance(source, str)]
    if len(texts) < len(sources):
        raise BadRequest("With `labels`, texts are strings: each is read with a sentence.", "input")
    if len(texts) * len(labels) > facts.limits.inputs:
        raise too_many("labels", facts.limits.inputs, "pairs of texts and labels", len(texts) * len(labels))
    sentences = [template.replace("{}", label) for label in labels]
    params = PoolingParams(task="classify", use_activation=False).resolve(facts)
    pairs = [(text, sentence) for text in texts for sentence in sentences]
    return texts_and_pairs(pairs, truncation, params, facts, tokenizer)


def entailed_probs(
    vectors: Sequence[Vectors], labels: int, facts: Facts, *, multi_label: bool
) -> NDArray[np.floating]:
    """The probabilities [texts, labels]: of each label alone if several may be true, or among all of them."""
    logits = np.stack([as_array(one) for one in vectors]).astype(np.float64)
    logits = logits.reshape(-1, labels, logits.shape[-1])  # [texts, labels, classes]
    entailed = entailment_of(facts)
    if multi_label or labels == 1:
        contradicted = -1 if entailed == 0 else 0
        return 1 / (1 + np.exp(logits[:, :, contradicted] - logits[:, :, entailed]))
    powers = np.exp(logits[:, :, entailed] - logits[:, :, entailed].max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
