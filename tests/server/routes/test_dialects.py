"""Bodies and answers of Jina, Voyage, Infinity and TEI at paths that several APIs have."""

from typing import Any

import httpx
import pytest
from fake_api import assert_the_same_if_long, make_app, make_client, post
from fake_frontend import FakeFrontend, vectors

from models.pooling.config import PoolingConfig
from models.pooling.text_files import TextFacts

EMBED = "/v1/embeddings"


@pytest.fixture(autouse=True)
def prompted(frontend: FakeFrontend, embedder: None) -> None:
    texts = TextFacts(prompts={"query": "q", "document": "d", "clustering": "c"})
    pooling = PoolingConfig(matryoshka=True, texts=texts)
    frontend.serve("embed", "token_embed", pooling=pooling, max_text_len=4)


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


@pytest.fixture
def ranks(frontend: FakeFrontend) -> None:
    """Scores a pair by the last byte of the document."""
    pooling = PoolingConfig(num_labels=1)
    frontend.serve("classify", score_type="cross-encoder", pooling=pooling, max_text_len=12)
    frontend.answer_of = lambda item: vectors([item.tokens[-1] / 100])


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
