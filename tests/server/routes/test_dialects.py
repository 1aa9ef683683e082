"""Bodies and answers of Jina, Voyage, Infinity and TEI at paths that several APIs have."""

from typing import Any

import httpx
import pytest
from fake_api import assert_the_same_if_long, make_app, make_client, post
from fake_frontend import BOS, FakeFrontend, vectors

from models.pooling.config import PoolingConfig
from models.pooling.text_files import TextFacts

EMBED = "/v1/embeddings"


@pytest.fixture(autouse=True)
def prompted(frontend: FakeFrontend, embedder: None) -> None:
    texts = TextFacts(prompts={"query": "q", "document": "d", "clustering": "c"})
    pooling = PoolingConfig(matryoshka=True, texts=texts)
    frontend.serve("embed", "token_embed", pooling=pooling, max_text_len=4)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"task": "retrieval.query"}, [BOS, 113, 97]),
        ({"task": "retrieval.passage", "late_chunking": False}, [BOS, 100, 97]),
        ({"task": "separation", "embedding_type": "float"}, [BOS, 99, 97]),
        ({"task": "text-matching", "normalized": True}, [BOS, 97]),
        ({"input": [{"text": "a"}], "truncate": True}, [BOS, 97]),
        ({"dialect": "voyage", "input": "aaaaaa", "output_dtype": "float"}, [BOS, 97, 97, 97]),
        ({"dialect": "voyage", "input_type": "query", "output_dimension": 4}, [BOS, 113, 97]),
    ],
)
async def test_their_fields_mean_ours(
    client: httpx.AsyncClient, frontend: FakeFrontend, fields: dict[str, Any], tokens: list[int]
) -> None:
    answer = await post(client, EMBED, **{"input": "a", **fields})
    assert frontend.pooled_tokens() == [tokens]
    assert len(answer["data"][0]["embedding"]) == fields.get("output_dimension", 8)


@pytest.mark.parametrize(
    "fields", [{"output_dtype": "ubinary", "dialect": "voyage"}, {"embedding_type": "ubinary"}]
)
async def test_bits(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    [theirs] = (await post(client, EMBED, input="a", **fields))["data"]
    [ours] = (await post(client, EMBED, input="a", embed_dtype="ubinary"))["data"]
    assert theirs == ours and len(ours["embedding"]) == 1


@pytest.mark.parametrize(
    ("dialect", "fields", "said"),
    [
        ("", {"late_chunking": True}, "late_chunking"),
        ("voyage", {"output_dtype": "int3"}, "float, int8, uint8"),
        ("", {"embedding_type": ["binary"]}, "POST /v2/embed"),
        ("", {"task": "code.query"}, '"param":"task"'),
        ("", {"task": "code.query", "prompt_name": "query"}, "`prompt_name` and `task` both"),
        ("", {"task": "code.query", "input_type": "some.query"}, '"param":"input_type"'),
        ("voyage", {"truncation": "yes"}, "`truncation` is true or false"),
        ("voyage", {"input": "aaaaaa", "truncation": False}, "maximum context length"),
        ("", {"task": ["x"]}, "`task` is the purpose"),
        ("", {"output_dtype": "int8"}, "takes with the header `X-Facet-Dialect: voyage`"),
        ("jina", {}, "cohere, tei, voyage, infinity, not 'jina'"),
    ],
)
async def test_what_has_no_meaning_here_is_refused(
    client: httpx.AsyncClient, dialect: str, fields: dict[str, Any], said: str
) -> None:
    headers = {"x-facet-dialect": dialect} if dialect else {}
    answer = await client.post(EMBED, json={"input": "a", **fields}, headers=headers)
    assert answer.status_code == 400 and said in answer.text


async def test_paths_of_infinity(client: httpx.AsyncClient) -> None:
    one, other = [await post(client, path, input="a", model="tiny") for path in (EMBED, "/embeddings")]
    assert one["data"] == other["data"]
    assert (await client.get("/models")).json()["data"] == (await client.get("/v1/models")).json()["data"]


@pytest.fixture
def ranks(frontend: FakeFrontend) -> None:
    """Scores a pair by the last byte of the document."""
    pooling = PoolingConfig(num_labels=1)
    frontend.serve("classify", score_type="cross-encoder", pooling=pooling, max_text_len=12)
    frontend.answer_of = lambda item: vectors([item.tokens[-1] / 100])


@pytest.mark.usefixtures("ranks")
async def test_voyages_ranking(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    asked = {"query": "q", "documents": ["a", "c", "b" * 30], "model": "tiny"}
    answer = await post(client, "/v1/rerank", "voyage", **asked, top_k=2, return_documents=True)
    assert answer == {
        "object": "list",
        "model": "org/tiny",
        "data": [
            {"index": 1, "relevance_score": pytest.approx(0.99), "document": "c"},
            {"index": 2, "relevance_score": pytest.approx(0.98), "document": "b" * 30},
        ],
        "usage": {"total_tokens": 2 + 2 + 12},
    }
    assert "document" not in (await post(client, "/v1/rerank", "voyage", **asked))["data"][0]
    headers = {"x-facet-dialect": "voyage"}
    refused = await client.post("/v1/rerank", json={**asked, "truncation": False}, headers=headers)
    assert refused.status_code == 400 and "maximum context length" in refused.text


@pytest.mark.usefixtures("ranks")
async def test_infinitys_ranking(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    asked = {"query": "q", "documents": ["a", "c"], "raw_scores": True, "return_documents": True}
    answer = await post(client, "/rerank", "infinity", **asked)
    assert frontend.pooled[-1][0][0].params.use_activation is False
    assert answer.pop("id") and answer.pop("created")
    usage = {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0}
    assert answer == {
        "object": "rerank",
        "model": "org/tiny",
        "usage": usage,
        "results": [
            {"index": 1, "relevance_score": pytest.approx(0.99), "document": "c"},
            {"index": 0, "relevance_score": pytest.approx(0.97), "document": "a"},
        ],
    }


async def test_infinitys_classes(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("classify", pooling=PoolingConfig(num_labels=2, labels=("bad", "good")))
    frontend.answer_of = lambda item: vectors([0.25, 0.75])
    answer = await post(client, "/classify", "infinity", input=["a", "b"], raw_scores=False)
    assert frontend.pooled[-1][0][0].params.use_activation is None
    assert (answer["object"], answer["model"]) == ("classify", "org/tiny")
    assert answer["data"] == [[{"label": "good", "score": 0.75}, {"label": "bad", "score": 0.25}]] * 2
    await post(client, "/classify", "infinity", input="a", raw_scores=True)
    assert frontend.pooled[-1][0][0].params.use_activation is False


@pytest.mark.usefixtures("ranks")
async def test_text_embeddings_inferences_ranking(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    fields = {"texts": ["a", "c", "b"], "raw_scores": True, "return_text": True}
    answer = await post(client, "/rerank", "tei", query="q", **fields)
    assert answer == [
        {"index": 1, "score": pytest.approx(0.99), "text": "c"},
        {"index": 2, "score": pytest.approx(0.98), "text": "b"},
        {"index": 0, "score": pytest.approx(0.97), "text": "a"},
    ]
    assert frontend.pooled[-1][0][0].params.use_activation is False
    assert (await post(client, "/rerank", "tei", query="q", texts=["a"]))[0].keys() == {"index", "score"}
    await post(
        client, "/rerank", "tei", query="q", texts=["a" * 50], truncate=True, truncation_direction="Left"
    )
    assert len(frontend.pooled[-1][0][0].tokens) == 12


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("field", "dialect"), [("texts", "tei"), ("raw_scores", "infinity"), ("top_k", "voyage")]
)
async def test_fields_of_a_dialect_do_not_ask_for_it(
    client: httpx.AsyncClient, field: str, dialect: str
) -> None:
    body = {"query": "q", "documents": ["a"], field: 1}
    answer = await client.post("/rerank", json=body)
    assert answer.status_code == 400 and f"X-Facet-Dialect: {dialect}" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("tei", {"texts": ["b", "cc"], "return_text": True}),
        ("voyage", {"documents": ["b", "cc"], "top_k": 1}),
        ("infinity", {"documents": ["b", "cc"], "raw_scores": False}),
    ],
)
async def test_long_bodies(
    client: httpx.AsyncClient, frontend: FakeFrontend, dialect: str, body: dict[str, Any]
) -> None:
    await assert_the_same_if_long(client, frontend, "/rerank", {"query": "a", **body}, dialect)


async def test_the_operator_chooses_the_dialect(frontend: FakeFrontend) -> None:
    frontend.serve("embed", score_type="bi-encoder")
    async with make_client(make_app(frontend, dialect="tei")) as client:
        assert len(await post(client, "/rerank", query="q", texts=["a"])) == 1
        assert (await post(client, "/rerank", "cohere", query="q", documents=["a"]))["results"]
        assert (await post(client, "/v2/rerank", query="q", documents=["a"]))["results"]
