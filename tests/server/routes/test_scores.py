"""Scores and rankings over HTTP, under all names of their fields and routes."""

import json
from typing import Any

import httpx
import pytest
from fake_api import post, refusal
from fake_frontend import BOS, FakeFrontend, vectors

from models.pooling.config import PoolingConfig
from models.pooling.text_files import TextFacts
from server.errors import Unavailable


@pytest.fixture(autouse=True)
def cross_encoder(frontend: FakeFrontend) -> None:
    """Scores a pair by the last byte of the document."""
    frontend.serve("classify", score_type="cross-encoder", pooling=PoolingConfig(num_labels=1))
    frontend.answer_of = lambda item: vectors([item.tokens[-1] / 100])


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "keys", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
async def test_every_name_of_the_fields(client: httpx.AsyncClient, path: str, keys: tuple[str, str]) -> None:
    answer = await post(client, path, model="tiny", **{keys[0]: "q", keys[1]: ["a", "b"]})
    assert answer.pop("id").startswith("score-") and answer.pop("created")
    data = answer.pop("data")
    assert answer == {
        "object": "list",
        "model": "org/tiny",
        "usage": {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0},
    }
    assert data == [
        {"index": 0, "object": "score", "score": pytest.approx(0.97)},
        {"index": 1, "object": "score", "score": pytest.approx(0.98)},
    ]


@pytest.mark.parametrize(
    ("first", "second", "tokens"),
    [
        ("q", "a", [b"qa"]),
        (["q"], ["a", "b"], [b"qa", b"qb"]),
        (["q", "r"], ["a", "b"], [b"qa", b"rb"]),
        ({"content": [{"type": "text", "text": "q"}]}, [{"text": "a"}, {"content": "b"}], [b"qa", b"qb"]),
    ],
)
async def test_shapes(
    client: httpx.AsyncClient, frontend: FakeFrontend, first: object, second: object, tokens: list[bytes]
) -> None:
    await post(client, "/score", text_1=first, text_2=second)
    assert [bytes(item.tokens) for item in frontend.pooled[-1][0]] == tokens


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "Input lengths must be either 1:1, 1:N or N:N"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "Input lengths must be either 1:1, 1:N or N:N"),
        ({"text_1": [], "text_2": ["c"]}, "At least one text element must be given"),
        ({"text_1": "a", "text_2": []}, "At least one text_pair element must be given"),
        ({"text_1": "a"}, "Two fields hold the texts to compare: text_1 and text_2, queries and"),
        ({"text_1": "a", "documents": ["b"]}, "Two fields hold the texts"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "Two fields hold the texts"),
        ({"text_1": 5, "text_2": "b"}, "Input should be a text, an object"),
        ({"text_1": "a", "text_2": [{"content": [{"type": "image_url"}]}]}, "needs a URL in `image_url`"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "must be non-negative"),
        ({"text_1": "a", "text_2": "b" * 200}, "pair 0 contains 201 input tokens"),
        ({"text_1": "a", "text_2": ["b"] * 16385}, "`text_2` may hold at most 16384"),
    ],
)
async def test_what_cannot_be_scored(client: httpx.AsyncClient, body: dict[str, Any], told: str) -> None:
    assert told in (await refusal(client, "/score", **body))["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_the_best_first_and_equals_in_their_order(client: httpx.AsyncClient, path: str) -> None:
    answer = await post(client, path, query="q", documents=["xb", "ya", "zb", "c"])
    assert answer.pop("id").startswith("score-")
    results = answer.pop("results")
    assert answer == {
        "model": "org/tiny",
        "usage": {"prompt_tokens": 11, "total_tokens": 11, "completion_tokens": 0},
    }
    assert [one["index"] for one in results] == [3, 0, 2, 1]
    assert results[0] == {
        "index": 3,
        "relevance_score": pytest.approx(0.99),
        "document": {"text": "c", "multi_modal": None},
    }


async def test_how_many_and_with_what(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    documents = ["a", {"text": "c"}, "b"]
    answer = await post(client, "/rerank", query="q", documents=documents, top_n=2, return_documents=False)
    assert [sorted(one) for one in answer["results"]] == [["index", "relevance_score"]] * 2
    assert [one["index"] for one in answer["results"]] == [1, 2]
    assert len((await post(client, "/rerank", query="q", documents=documents, top_n=0))["results"]) == 3
    error = await refusal(client, "/rerank", query="q", documents=documents, top_n=-1)
    assert error["param"] == "body.top_n"
    await post(client, "/rerank", query="q", documents="a", use_activation=False, truncate_prompt_tokens=-1)
    assert frontend.pooled[-1][0][0].params.use_activation is False
    await post(
        client, "/rerank", query="query", documents=["abcdef"], max_tokens_per_query=2, max_tokens_per_doc=3
    )
    assert bytes(frontend.pooled[-1][0][0].tokens) == b"quabc"


async def test_models_with_more_labels(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("classify", score_type=None, pooling=PoolingConfig(num_labels=3))
    for path in ("/score", "/rerank"):
        assert "3 labels. Use POST /classify." in (await refusal(client, path))["message"]


async def test_vectors_are_compared(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("embed", score_type="bi-encoder")
    frontend.answer_of = lambda item: vectors([1, 0] if item.tokens[-1] == 97 else [3, 4])
    answer = await post(client, "/score", text_1="a", text_2=["a", "b"])
    assert [one["score"] for one in answer["data"]] == pytest.approx([1, 0.6])
    assert answer["usage"]["prompt_tokens"] == 6


async def test_a_lost_query_is_sent_again(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("token_embed", score_type="late-interaction")
    answer_of = frontend.answer_of

    def answer_and_lose(item: Any) -> Any:
        if item.params.late_query and len(frontend.pooled) == 1:
            frontend.pool_errors.append(Unavailable("the vectors of this query are not kept any more"))
        return answer_of(item)

    frontend.answer_of = answer_and_lose
    answer = await post(client, "/rerank", query="q", documents=["a", "b"])
    assert [one["index"] for one in answer["results"]] == [1, 0]
    assert len(frontend.pooled) == 4
    assert {options["group"] for _, options in frontend.pooled} == {1}


async def test_as_text_embeddings_inference_embeds(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("embed", "token_embed", score_type="bi-encoder")
    frontend.answer_of = lambda item: vectors([len(item.tokens), 0.5])
    assert await post(client, "/embed", inputs="ab") == [[3, 0.5]]
    assert await post(client, "/embed", inputs=["ab", "c"], normalize=False) == [[3, 0.5], [2, 0.5]]
    assert frontend.pooled[-1][0][0].params.use_activation is False
    assert await post(client, "/embed", inputs=[1, 2, 3, 4]) == [[4, 0.5]]
    assert await post(client, "/embed", inputs="a" * 500, truncate=True) == [[128, 0.5]]
    assert "maximum context length" in (await refusal(client, "/embed", inputs="a" * 500))["message"]

    frontend.answer_of = lambda item: vectors([[token, 1] for token in item.tokens])
    assert await post(client, "/embed_all", inputs="a") == [[[BOS, 1], [97, 1]]]
    frontend.answer_of = lambda item: vectors([1, 0] if item.tokens[-1] == 97 else [3, 4])
    inputs = {"source_sentence": "a", "sentences": ["a", "b"]}
    assert await post(client, "/similarity", inputs=inputs) == pytest.approx([1, 0.6])
    assert await post(client, "/similarity", inputs=inputs, parameters={"truncate": True}) == pytest.approx(
        [1, 0.6]
    )
    frontend.serve("embed", score_type="bi-encoder", pooling=PoolingConfig(texts=TextFacts(similarity="dot")))
    assert await post(client, "/similarity", inputs=inputs) == pytest.approx([1, 3])


async def test_as_text_embeddings_inference_predicts(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    frontend.serve("classify", score_type=None, pooling=PoolingConfig(num_labels=2, labels=("no", "yes")))
    frontend.answer_of = lambda item: vectors([0.25, 0.75])
    one = [{"score": 0.75, "label": "yes"}, {"score": 0.25, "label": "no"}]
    assert await post(client, "/predict", inputs="a") == one
    assert frontend.pooled_tokens() == [[BOS, 97]]
    assert await post(client, "/predict", inputs=["a", "b"], raw_scores=True) == one
    assert frontend.pooled_tokens() == [[97, 98]]
    assert await post(client, "/predict", inputs=[["a"], ["a", "b"]]) == [one, one]
    error = await refusal(client, "/predict", inputs=[["a"], ["a", "b" * 1000]])
    assert "pair 1 contains" in error["message"]
    error = await refusal(client, "/predict", inputs=[["a", "b"], ["b" * 1000]])
    assert "inputs 1 contains" in error["message"]
    error = await refusal(client, "/predict", inputs=[["a"]] * (frontend.facts.limits.inputs + 1))
    assert error["param"] == "inputs"
    for wrong in ([], ["a", "b", "c"], [["a", "b", "c"]], 5, [[]], ["a", ["b"]]):
        assert (
            "a list of lists with one or two texts"
            in (await refusal(client, "/predict", inputs=wrong))["message"]
        )


@pytest.mark.parametrize("path", ["/embed", "/embed_all"])
@pytest.mark.parametrize("inputs", [None, []])
async def test_as_text_embeddings_inference_needs_a_text(
    client: httpx.AsyncClient, frontend: FakeFrontend, path: str, inputs: object
) -> None:
    frontend.serve("embed", "token_embed", score_type=None)
    error = await refusal(client, path, inputs=inputs)
    assert (error["message"], error["param"]) == (
        "`inputs` must not be empty: give at least one text.",
        "inputs",
    )


async def test_what_text_embeddings_inference_tells_of_itself(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    info = (await client.get("/info")).json()
    assert (info["model_id"], info["max_input_length"]) == ("org/tiny", 128)
    assert info["model_type"] == {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    frontend.serve("embed", score_type="bi-encoder", pooling=PoolingConfig(modes=("MEAN",)))
    assert (await client.get("/info")).json()["model_type"] == {"embedding": {"pooling": "mean"}}


async def test_long_answers_are_written_in_pieces(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("embed")
    frontend.answer_of = lambda item: vectors([1 / 3] * 4000)
    async with client.stream("POST", "/embed", json={"inputs": ["a"] * 30}) as answer:
        assert "content-length" not in answer.headers
        body = await answer.aread()
    assert len(body) > 1_000_000 and json.loads(body) == [[pytest.approx(1 / 3)] * 4000] * 30
