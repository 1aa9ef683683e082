"""Bodies of Jina, Voyage and Infinity, which their clients send to paths of ours."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_api import post
from fake_frontend import BOS, FakeFrontend

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
        ({"input": "aaaaaa", "truncation": True, "output_dtype": "float"}, [BOS, 97, 97, 97]),
        ({"input_type": "query", "output_dimension": 4, "truncation": None}, [BOS, 113, 97]),
    ],
)
async def test_their_fields_mean_ours(
    client: httpx.AsyncClient, frontend: FakeFrontend, fields: dict[str, Any], tokens: list[int]
) -> None:
    answer = await post(client, EMBED, **{"input": "a", **fields})
    assert frontend.pooled_tokens() == [tokens]
    assert len(answer["data"][0]["embedding"]) == fields.get("output_dimension", 8)


@pytest.mark.parametrize("fields", [{"output_dtype": "ubinary"}, {"embedding_type": "ubinary"}])
async def test_bits(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    [theirs] = (await post(client, EMBED, input="a", **fields))["data"]
    [ours] = (await post(client, EMBED, input="a", embed_dtype="ubinary"))["data"]
    assert theirs == ours and len(ours["embedding"]) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"late_chunking": True}, "`spans` or `chunking`"),
        ({"output_dtype": "int3"}, "float, int8, uint8"),
        ({"embedding_type": ["binary"]}, "POST /v2/embed"),
        ({"task": "code.query"}, "no prompt named"),
        ({"truncation": "yes"}, "true or false"),
        ({"input": "aaaaaa", "truncation": False}, "maximum context length"),
        ({"task": ["x"]}, "input_type"),
    ],
)
async def test_what_has_no_meaning_here_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], said: str
) -> None:
    answer = await client.post(EMBED, json={"input": "a", **fields})
    assert answer.status_code == 400 and said in answer.text


async def test_paths_of_infinity(client: httpx.AsyncClient) -> None:
    one, other = [await post(client, path, input="a", model="tiny") for path in (EMBED, "/embeddings")]
    assert one["data"] == other["data"]
    assert (await client.get("/models")).json()["data"] == (await client.get("/v1/models")).json()["data"]
