"""How similar two vectors are, and how likely labels are by their vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.pooling.representations import CosineScores
from models.pooling.text_files import Similarity
from server.requests.vectors import as_array, token_ids
from worker.protocol import Vectors


def compare_sparse(left: Vectors, right: Vectors, similarity: Similarity = "dot") -> float:
    """The similarity of two sparse vectors: numbers that are not there are zero."""
    _, one, two = np.intersect1d(token_ids(left), token_ids(right), assume_unique=True, return_indices=True)
    ours, theirs = (as_array(each).astype(np.float64) for each in (left, right))
    dot = float(ours[one] @ theirs[two])
    match similarity:
        case "dot":
            return dot
        case "euclidean":
            return -float(np.sqrt(max(0.0, ours @ ours + theirs @ theirs - 2 * dot)))
        case "manhattan":
            only = np.delete(ours, one).sum() + np.delete(theirs, two).sum()
            return -float(np.abs(ours[one] - theirs[two]).sum() + only)
        case "cosine" | "maxsim" | "meanmaxsim":
            lengths = float(np.linalg.norm(ours) * np.linalg.norm(theirs))
            return dot / lengths if lengths else 0.0


def compare(left: Vectors, right: Vectors, similarity: Similarity) -> float:
    """The similarity of two vectors as sentence-transformers computes it: distances are negative.

    Measures for many vectors compare two single ones by their angle.
    """
    one, two = as_array(left).astype(np.float64), as_array(right).astype(np.float64)
    match similarity:
        case "dot":
            return float(one @ two)
        case "euclidean":
            return -float(np.linalg.norm(one - two))
        case "manhattan":
            return -float(np.abs(one - two).sum())
        case "cosine" | "maxsim" | "meanmaxsim":
            lengths = float(np.linalg.norm(one) * np.linalg.norm(two))
            return float(one @ two) / lengths if lengths else 0.0


def label_probs(vectors: Sequence[Vectors], labels: int, learned: CosineScores) -> NDArray[np.floating]:
    """The probabilities [inputs, labels] of labels, whose own vectors come last. All have the length 1."""
    rows = np.stack([as_array(one) for one in vectors])
    scores = learned.scale * (rows[:-labels] @ rows[-labels:].T) + learned.bias
    if learned.activation == "sigmoid":
        return 1 / (1 + np.exp(-scores))
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
