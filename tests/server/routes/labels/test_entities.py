"""Entities of labels that a request names, over a scripted model that scores pieces of the text."""

from typing import Any

import httpx
import numpy as np
import pytest
from fake_api import post, refusal
from fake_frontend import BOS, FakeFrontend, vectors

from models.pooling.config import PoolingConfig
from models.pooling.entity_files import EntityFacts
from server.requests.labels.entities import EntityOptions, find_entities
from server.requests.pooling import Item

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


async def test_words_and_labels_are_one_sequence(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.answer_of = lambda item: vectors(scored((0, 1, 0, 0.9), (3, 3, 1, 0.75)))
    answer = await post(client, "/ner", input=[TEXT, "  ", TEXT], labels=["who", "it"], request_id="a")
    (one, other), _ = frontend.pooled[-1]
    assert one.tokens == [BOS, *b"[who[it]", *TEXT.replace(" ", "").encode()] == other.tokens
    spans = [(1, 2), (5, 6), (9, 12), (12, 20), (20, 23), (23, 27), (27, 28)]
    assert (one.params.task, one.params.labels, list(one.params.spans)) == ("ner", 2, spans)
    found = [
        {"start": 0, "end": 12, "text": "Ada Lovelace", "label": "who", "score": pytest.approx(0.9)},
        {"start": 17, "end": 21, "text": "Mr-X", "label": "it", "score": pytest.approx(0.75)},
    ]
    assert [entry["entities"] for entry in answer["data"]] == [found, [], found]
    assert answer["usage"]["prompt_tokens"] == 56


async def test_what_is_refused(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": TEXT, "labels": ["a", "a"]}, "must differ"),
        ({"input": TEXT, "labels": ["a]"]}, "stands between labels"),
        ({"input": TEXT, "labels": [" "]}, "is empty"),
        ({"input": TEXT, "labels": []}, "at least 1 item"),
        ({"input": TEXT, "labels": ["a"] * 129}, "at most 128 labels"),
        ({"input": [], "labels": ["a"]}, "at least one text"),
        ({"input": [[1, 2]], "labels": ["a"]}, "at least one text"),
        ({"input": "a b c d e f g", "labels": ["a"]}, "up to 6 words, and input 0"),
        ({"input": TEXT, "labels": ["a"], "threshold": 1}, "less than 1"),
    ]
    for body, told in wrong:
        assert told in (await refusal(client, "/ner", **body))["message"]
    frontend.answer_of = lambda item: vectors([[0.0]])
    await post(client, "/ner", input="a b c d e f g", labels=["a"], truncate=True)
    assert len(frontend.pooled[-1][0][0].params.spans) == 7
    frontend.serve("embed")
    assert "'ner'" in (await refusal(client, "/ner", input=TEXT, labels=["a"]))["message"]


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


async def test_ends_of_entities(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    """A word inside that is unlikely ends what could go on; the least of all scores is the entity's."""
    serve(frontend, span_mode="token_level")
    probs = np.full((5, 1, 3), 0.1)
    probs[[0, 3], 0, 0] = 0.9  # begins
    probs[[1, 4], 0, 1] = 0.8  # ends
    probs[[0, 1, 3, 4], 0, 2] = 0.7, 0.95, 0.95, 0.95

    def answer(item: Item) -> Any:
        return vectors(np.log(probs / (1 - probs)).reshape(5, 3))

    frontend.answer_of = answer
    found = (await post(client, "/ner", input=TEXT, labels=["who"]))["data"][0]["entities"]
    assert [(each["text"], round(each["score"], 4)) for each in found] == [
        ("Ada Lovelace", 0.7),
        ("Mr-X.", 0.8),
    ]
