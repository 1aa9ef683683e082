"""Scores and rankings over HTTP, under all names of their fields and routes."""

import json
from typing import Any

import httpx
import pytest
from fake_api import post, refusal
from fake_frontend import FakeFrontend, vectors

from models.pooling.config import PoolingConfig
from server.errors import Unavailable


@pytest.fixture(autouse=True)
def cross_encoder(frontend: FakeFrontend) -> None:
    """Scores a pair by the last byte of the document."""
    frontend.serve("classify", score_type="cross-encoder", pooling=PoolingConfig(num_labels=1))
    frontend.answer_of = lambda item: vectors([item.tokens[-1] / 100])


async def test_more_texts_than_may_be_compared(client: httpx.AsyncClient) -> None:
    told = await refusal(client, "/score", text_1="a", text_2=["b"] * 16385)
    assert "`text_2` may hold at most 16384" in told["message"]


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


async def test_long_answers_are_written_in_pieces(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.serve("embed")
    frontend.answer_of = lambda item: vectors([1 / 3] * 4000)
    async with client.stream("POST", "/embed", json={"inputs": ["a"] * 30}) as answer:
        assert "content-length" not in answer.headers
        body = await answer.aread()
    assert len(body) > 1_000_000 and json.loads(body) == [[pytest.approx(1 / 3)] * 4000] * 30
