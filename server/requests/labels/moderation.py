"""Maps a classifier's labels to the categories of moderation, each from some score on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

THRESHOLD = 0.5

CATEGORIES: tuple[str, ...] = (
    "harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent",
    "self-harm", "self-harm/intent", "self-harm/instructions", "sexual", "sexual/minors", "violence",
    "violence/graphic",
)  # fmt: skip
"""OpenAI's categories, each of which an answer has."""

_USUAL: Mapping[str, Sequence[str]] = {
    **{name: (name,) for name in CATEGORIES},
    # Jigsaw's labels, as toxic-bert and its kin have them.
    "toxic": ("harassment",), "toxicity": ("harassment",), "severe_toxic": ("harassment",),
    "severe_toxicity": ("harassment",), "insult": ("harassment",), "obscene": ("harassment",),
    "threat": ("harassment/threatening", "violence"), "identity_hate": ("hate",),
    "identity_attack": ("hate",), "sexual_explicit": ("sexual",),
    # OpenAI's first names, as KoalaAI's models have them.
    "h": ("hate",), "h2": ("hate/threatening",), "hr": ("harassment",), "s": ("sexual",),
    "s3": ("sexual/minors",), "sh": ("self-harm",), "v": ("violence",), "v2": ("violence/graphic",),
    "hateful": ("hate",), "offensive": ("harassment",), "nsfw": ("sexual",),
    # Prompt Guard's.
    "injection": ("prompt-injection",), "jailbreak": ("jailbreak",), "malicious": ("jailbreak",),
}  # fmt: skip
"""The categories of labels that published classifiers have, in small letters."""


class Meaning(NamedTuple):
    """A category that a label speaks for, if its score reaches a threshold."""

    category: str
    threshold: float


Table = Mapping[str, Sequence[Meaning]]
"""The meanings of each label."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    category: str | list[str]
    threshold: float = THRESHOLD


class Verdict(msgspec.Struct, kw_only=True):
    """The result of moderation for one text."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[str]]


def read_table(path: Path) -> Table:
    """The table in a file of JSON. Raises ValueError with a sentence on what is wrong."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, str | list[str] | _Entry])
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ValueError(
            f'{path}: {error}. It should be an object such as {{"toxic": "harassment", "threat": '
            '{"category": ["violence"], "threshold": 0.4}}'
        ) from None
    return {label: _meanings(entry, path, label) for label, entry in found.items()}


def _meanings(entry: str | list[str] | _Entry, path: Path, label: str) -> list[Meaning]:
    threshold = entry.threshold if isinstance(entry, _Entry) else THRESHOLD
    if not 0 <= threshold <= 1:
        raise ValueError(f"{path}: the threshold of {label!r} must lie from 0 to 1, got {threshold:g}")
    named = entry.category if isinstance(entry, _Entry) else entry
    return [Meaning(name, threshold) for name in ([named] if isinstance(named, str) else named)]


def table_for(labels: Sequence[str], given: Table | None) -> Table:
    """The meanings of a model's labels: the operator's, or the usual ones; empty if none is known."""
    if given is not None:
        return {label: given[label] for label in labels if label in given}
    known = {label: _USUAL.get(label.lower().replace(" ", "_"), ()) for label in labels}
    return {label: [Meaning(name, THRESHOLD) for name in names] for label, names in known.items() if names}


def judge(labels: Sequence[str], scores: Sequence[float], table: Table) -> Verdict:
    """What the scores of a text's labels say. Of several labels of a category the highest score counts."""
    found = dict.fromkeys(CATEGORIES, 0.0)
    flags = dict.fromkeys(CATEGORIES, False)
    for label, score in zip(labels, scores, strict=True):
        for name, threshold in table.get(label, ()):
            found[name] = max(found.get(name, 0.0), score)
            flags[name] = flags.get(name, False) or score >= threshold
    covered = {name for meanings in table.values() for name, _ in meanings}
    return Verdict(
        flagged=any(flags.values()),
        categories=flags,
        category_scores=found,
        category_applied_input_types={name: ["text"] if name in covered else [] for name in found},
    )
