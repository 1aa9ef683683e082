"""Several representations of a text in one answer, and scores by all of them."""

import array
import base64

import httpx
import msgspec
import numpy as np
import pytest
from fake_api import post
from fake_frontend import FakeFrontend, vectors

from models.pooling.config import PoolingConfig
from models.pooling.text_files import TextFacts
from server.requests.pooling import PooledText
from worker.protocol import Vectors

pytestmark = pytest.mark.usefixtures("embedder")

EMBED, POOL, COHERE, SPARSE = "/v1/embeddings", "/pooling", "/v2/embed", "/embed_sparse"
WEIGHTS = Vectors(array.array("f", [0.5, 2.0]).tobytes(), (2,), array.array("i", [3, 70]).tobytes())
OF_TASK = {
    "embed": vectors([1, 2, 3, 4, 0, 0, 0, 0]),
    "sparse_embed": WEIGHTS,
    "token_embed": vectors([[1, 0], [0, 1]]),
}
JSON = {
    "dense": [1, 2, 3, 4, 0, 0, 0, 0],
    "sparse": {"indices": [3, 70], "values": [0.5, 2]},
    "tokens": [[1, 0], [0, 1]],
}


def answer(item: PooledText) -> Vectors:
    params = item.params
    first = (
        vectors([2, 4])
        if params.late_query
        else vectors([3])
        if params.late_document
        else OF_TASK[params.task]
    )
    return msgspec.structs.replace(first, others={task: OF_TASK[task] for task in params.outputs})


@pytest.fixture
def all_three(frontend: FakeFrontend) -> FakeFrontend:
    frontend.serve("embed", "token_embed", "sparse_embed", score_type="bi-encoder")
    frontend.answer_of = answer
    return frontend


async def test_outputs(client: httpx.AsyncClient, all_three: FakeFrontend) -> None:
    outputs = ["sparse", "dense", "tokens"]
    [entry] = (await post(client, EMBED, input="a", outputs=outputs))["data"]
    assert (entry["embedding"], entry["sparse"], entry["tokens"]) == (
        *(JSON[name] for name in ("dense", "sparse", "tokens")),
    )
    assert all_three.pooled[-1][0][0].params.outputs == ("embed", "token_embed")
    [entry] = (await post(client, POOL, input="a", outputs=["tokens", "sparse"]))["data"]
    assert entry["data"] == {name: JSON[name] for name in ("tokens", "sparse")}
    [entry] = (await post(client, POOL, input="a", task="sparse_embed"))["data"]
    assert entry["data"] == JSON["sparse"]
    [entry] = (await post(client, EMBED, input="a", outputs=["sparse"]))["data"]
    assert "embedding" not in entry
    coded = (await post(client, EMBED, input="a", outputs=["dense", "tokens"], encoding_format="base64"))[
        "data"
    ][0]
    assert np.frombuffer(base64.b64decode(coded["tokens"]), "<f4").tolist() == [1, 0, 0, 1]
    many = await post(client, COHERE, texts=["a", "b"], outputs=outputs, embedding_types=["float", "ubinary"])
    assert many["embeddings"] == {
        "float": [JSON["dense"]] * 2,
        "ubinary": [[0xF0]] * 2,
        "sparse": [JSON["sparse"]] * 2,
        "tokens": [JSON["tokens"]] * 2,
    }
    assert await post(client, SPARSE, inputs=["a"]) == [
        [{"index": 3, "value": 0.5}, {"index": 70, "value": 2}]
    ]


@pytest.mark.parametrize(
    ("weights", "score"),
    [
        ([1, 1, 1], (30 + 4.25 + 3 / 4) / 3),
        ([0.4, 0.2, 0.4], 0.4 * 30 + 0.2 * 4.25 + 0.4 * 3 / 4),
        ([0, 2, 0], 4.25),
        ([1, 3, 0], (30 + 3 * 4.25) / 4),
    ],
)
async def test_scores_by_all_outputs(
    client: httpx.AsyncClient, all_three: FakeFrontend, weights: list[float], score: float
) -> None:
    """FlagEmbedding's formula: the score of tokens is a mean over the vectors of the query, which has 4."""
    for path, body in (
        ("/score", {"text_1": "a", "text_2": ["b"]}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        found = await post(client, path, weights_for_different_modes=weights, **body)
        [entry] = found.get("data") or found["results"]
        assert entry.get("score", entry.get("relevance_score")) == pytest.approx(score)


async def test_sparse_vectors_are_compared(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    pooling = PoolingConfig(texts=TextFacts(similarity="dot"))
    frontend.serve("sparse_embed", score_type="sparse", pooling=pooling)
    frontend.answer_of = answer
    found = await post(client, "/score", text_1="a", text_2=["b", "c"])
    assert [entry["score"] for entry in found["data"]] == [4.25, 4.25]
