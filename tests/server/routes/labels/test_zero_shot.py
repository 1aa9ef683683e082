"""Classes that a request names, over a scripted model that tells whether a text entails a sentence."""

from typing import Any

import httpx
import numpy as np
import pytest
from fake_api import post, refusal
from fake_frontend import FakeFrontend, vectors

from models.pooling.config import PoolingConfig

LOGITS = {"a": [3.0, 0.5, -1.0], "b": [-0.5, 0.0, 2.5], "c": [0.2, 1.0, 0.4]}
"""The logits of a text with the sentence about a label, by the last letter of the latter."""


@pytest.fixture(autouse=True)
def nli(frontend: FakeFrontend) -> None:
    serve(frontend, "contradiction", "neutral", "ENTAILMENT")
    frontend.answer_of = lambda item: vectors(LOGITS[chr(item.tokens[-1])])


def serve(frontend: FakeFrontend, *labels: str) -> None:
    frontend.serve("classify", pooling=PoolingConfig(num_labels=len(labels), labels=labels))


async def test_labels_share_all_of_a_text_among_them(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    answer = await post(
        client, "/classify", input=["x", "y"], labels=["a", "b", "c"], hypothesis_template="on {}"
    )
    items, _ = frontend.pooled[-1]
    assert [bytes(item.tokens) for item in items[:3]] == [b"xon a", b"xon b", b"xon c"]
    assert all(item.params.use_activation is False for item in items)
    powers = np.exp([-1.0, 2.5, 0.4])
    for entry in answer["data"]:
        assert entry["probs"] == pytest.approx(powers / powers.sum())
        assert (entry["label"], entry["num_classes"]) == ("b", 3)


async def test_several_labels_may_be_true(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.answer_of = lambda item: vectors(LOGITS[chr(item.tokens[-2])])
    found = await post(client, "/classify", input="x", labels=["a", "b"], multi_label=True)
    assert bytes(frontend.pooled[-1][0][0].tokens) == b"xThis example is a."
    wanted = [np.exp(own[2]) / (np.exp(own[2]) + np.exp(own[0])) for own in (LOGITS["a"], LOGITS["b"])]
    assert found["data"][0]["probs"] == pytest.approx(wanted)


async def test_entailment_may_be_the_first_of_two_classes(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    serve(frontend, "entailment", "not_entailment")
    frontend.answer_of = lambda item: vectors([1.0, -1.0])
    found = await post(client, "/classify", input="x", labels=["b"], hypothesis_template="{}")
    assert found["data"][0]["probs"] == pytest.approx([np.exp(1) / (np.exp(1) + np.exp(-1))])


async def test_what_cannot_be_labelled(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": [[1, 2]], "labels": ["a"]}, "texts are strings"),
        ({"input": "x", "labels": ["a"], "hypothesis_template": "no place"}, "needs a place for the label"),
        ({"input": "x", "multi_label": True}, "are for `labels`"),
        ({"input": ["x"] * 200, "labels": ["a"] * 100}, "at most 16384 pairs"),
        ({"messages": [{"role": "user", "content": "x"}], "labels": ["a"]}, "not as `messages`"),
    ]
    for body, told in wrong:
        assert told in (await refusal(client, "/classify", **body))["message"]
    serve(frontend, "joy", "anger")
    assert (
        "labels of its own: joy, anger"
        in (await refusal(client, "/classify", input="x", labels=["a"]))["message"]
    )
