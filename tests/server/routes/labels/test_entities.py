"""Entities of labels that a request names, over a scripted model that scores pieces of the text."""

from typing import Any

import numpy as np
import pytest
from fake_frontend import FakeFrontend

from models.pooling.config import PoolingConfig
from models.pooling.entity_files import EntityFacts
from server.requests.labels.entities import EntityOptions, find_entities

TEXT = "Ada Lovelace met Mr-X."
WORDS = [(0, 3), (4, 12), (13, 16), (17, 21), (21, 22)]
PIECES = [(at, at + wider) for wider in range(3) for at in range(5 - wider)]


@pytest.fixture(autouse=True)
def entities(frontend: FakeFrontend) -> None:
    serve(frontend)


def serve(frontend: FakeFrontend, **fields: Any) -> None:
    about = EntityFacts(max_width=3, max_len=6, ent_token="[", sep_token="]", **fields)
    frontend.serve("ner", pooling=PoolingConfig(entities=about))


def scored(*pieces: tuple[int, int, int, float]) -> Any:
    """The model's answer: the probabilities of some pieces for a label, and no other."""
    logits = np.full((len(PIECES), 2), -9.0, np.float32)
    for first, last, label, score in pieces:
        logits[PIECES.index((first, last)), label] = np.log(score / (1 - score))
    return logits


OVERLAPPING = [(0, 1, 0, 0.8), (0, 1, 1, 0.7), (1, 2, 0, 0.9), (2, 2, 1, 0.6), (1, 3, 1, 0.85)]


@pytest.mark.parametrize(
    ("flat", "multi_label", "kept"),
    [
        (True, False, [(4, 16, "who")]),
        (False, False, [(4, 16, "who"), (4, 21, "it"), (13, 16, "it")]),
        (False, True, [(4, 16, "who"), (4, 16, "it"), (4, 21, "it"), (13, 16, "it")]),
    ],
)
def test_overlaps(flat: bool, multi_label: bool, kept: Any, frontend: FakeFrontend) -> None:
    logits = scored(*OVERLAPPING, (1, 2, 1, 0.87))
    options = EntityOptions(0.5, flat, multi_label)
    found = find_entities(logits, TEXT, WORDS, ["who", "it"], options, frontend.facts)
    assert [(each.start, each.end, each.label) for each in found] == kept
