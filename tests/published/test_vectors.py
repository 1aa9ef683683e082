"""MiniLM has the vectors of sentence-transformers, and prompts are written as its own tests demand."""

import json
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import published
import pytest
from later import Later
from live import LiveServer, serving

st = Later("sentence_transformers")
PROMPTS = {"query": "query: ", "passage": "passage: "}
TEXTS = [
    "The capital of France is Paris.",
    "a",
    "Größe, naïve 東京 😀 def f(x): return x + 1",
    "A longer text, which is cut. " * 200,
]


class Both(NamedTuple):
    server: LiveServer
    reference: Any
    """sentence-transformers' model of the same folder."""

    def vectors(self, **body: object) -> list[list[float]]:
        answer = self.server.post(
            "/v1/embeddings", {"input": TEXTS, "truncate_prompt_tokens": -1, **body}
        ).json()
        return [each["embedding"] for each in answer["data"]]


@pytest.fixture(scope="module", params=(True, False), ids=("pooled with prompts", "pooled without"))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("minilm") / "it"
    shutil.copytree(published.short_named("minilm"), folder)
    for name, changes in (
        ("config_sentence_transformers.json", {"prompts": PROMPTS}),
        ("1_Pooling/config.json", {"include_prompt": request.param}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with serving(str(folder), "--dtype", "float32") as server:
        yield Both(server, st.SentenceTransformer(str(folder), device="cpu"))


def assert_same(found: list[list[float]], expected: Any) -> None:
    cosines = (
        (np.array(found) * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    )
    assert cosines.min() > 0.999999
    assert np.abs(np.array(found) - expected).max() < 1e-5


def test_vectors_are_those_of_sentence_transformers(both: Both) -> None:
    plain = both.vectors()
    assert_same(plain, both.reference.encode(TEXTS))
    assert both.server.post("/embed", {"inputs": TEXTS, "truncate": True}).json() == plain


def test_prompts_are_written_by_name_and_by_purpose(both: Both) -> None:
    """Documents have the prompt named passage, as there is none named document. sentence-transformers'
    `encode_document` would write none here, as models get an empty one of that name."""
    query = both.vectors(prompt_name="query")
    assert_same(query, both.reference.encode(TEXTS, prompt_name="query"))
    assert query == both.vectors(input_type="query") != both.vectors()
    assert_same(query, both.reference.encode_query(TEXTS))
    assert_same(both.vectors(input_type="document"), both.reference.encode(TEXTS, prompt_name="passage"))


def test_a_prompt_that_there_is_not_is_refused_with_those_that_there_are(both: Both) -> None:
    refused = both.server.post("/v1/embeddings", {"input": "a", "prompt_name": "invalid"})
    assert refused.status_code == 400
    assert "'query', 'passage'" in refused.json()["error"]["message"]
