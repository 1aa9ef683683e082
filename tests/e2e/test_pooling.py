"""Vectors, scores and labels from live servers, on tiny checkpoints and on MiniLM if it is installed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from live import LiveServer, serving
from tiny import tiny_checkpoint

from facet import LLM

pytestmark = pytest.mark.turns(4)

TEXTS = ["the quick brown fox", "the lazy dog", "import this", "system user assistant", "hello"]
SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "16M", "--block-size", "4")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def server(decoder: Path) -> Iterator[LiveServer]:
    """A server that generates and embeds with the same weights."""
    tasks = ("--tasks", "generate,embed,token_embed")
    with serving(str(decoder), *SMALL, *tasks, "--served-model-name", "tiny") as server:
        yield server


def embed(server: LiveServer, **body: object) -> list[list[float]]:
    response = server.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    return [one["embedding"] for one in response.json()["data"]]


def test_a_text_has_the_same_vector_in_any_company(server: LiveServer):
    together = embed(server, input=TEXTS, cache_salt="together")
    assert np.shape(together) == (5, 32) and np.linalg.norm(together, axis=1) == pytest.approx(1)
    alone = [embed(server, input=text, cache_salt=f"alone-{text}")[0] for text in TEXTS]
    assert np.array(alone) == pytest.approx(np.array(together), abs=1e-6)
    assert np.array(embed(server, input=TEXTS[::-1])) == pytest.approx(np.array(together[::-1]), abs=1e-6)


def test_cut_texts_stay_in_their_places(server: LiveServer):
    short, long = "hello", "the fox and the dog " * 400
    cut = embed(server, input=[short, long, short], truncate_prompt_tokens=-1)
    assert cut[0] == pytest.approx(cut[2], abs=1e-6) == embed(server, input=short)[0]
    assert cut[1] != pytest.approx(cut[0], abs=1e-2)


async def test_chat_and_vectors_at_the_same_time(server: LiveServer):
    talk: list[Any] = [{"role": "user", "content": "hello"}]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:

        async def chat() -> str:
            answer = await client.chat.completions.create(
                model="tiny", messages=talk, temperature=0, max_tokens=24
            )
            return answer.choices[0].message.content or ""

        async def vectors() -> list[list[float]]:
            answer = await client.embeddings.create(model="tiny", input=TEXTS * 8)
            return [one.embedding for one in answer.data]

        quiet = await chat(), await vectors()
        for said, found in zip(
            *[await asyncio.gather(*(work() for _ in range(6))) for work in (chat, vectors)], strict=True
        ):
            assert said == quiet[0]
            assert np.array(found) == pytest.approx(np.array(quiet[1]), abs=1e-6)
        mixed = await asyncio.gather(*(work() for _ in range(4) for work in (chat, vectors)))
        assert mixed[::2] == [quiet[0]] * 4
        assert np.array(mixed[1::2]) == pytest.approx(np.array([quiet[1]] * 4), abs=1e-6)


def test_very_many_texts_in_one_request(server: LiveServer):
    texts = [[5 + i % 300, 6] for i in range(2000)]
    vectors = embed(server, input=texts)
    assert len(vectors) == 2000
    assert vectors[1999] == pytest.approx(vectors[1699], abs=1e-6)
    assert vectors[1999] != pytest.approx(vectors[1698], abs=1e-2)


@pytest.mark.slow
def test_late_interaction_is_the_sum_of_best_matches(decoder: Path):
    options = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "cpu_threads": 1}
    with LLM(str(decoder), runner="pooling", tasks=["token_embed"], **options) as llm:
        assert llm.facts.score_type == "late-interaction"
        query, *documents = (one.outputs.data for one in llm.encode(TEXTS, use_tqdm=False))
        expected = [float((query @ document.T).max(1).sum()) for document in documents]
        found = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
        assert found == pytest.approx(expected, rel=1e-5)
        each = [one.outputs.score for one in llm.score([TEXTS[0]] * 4, TEXTS[1:], use_tqdm=False)]
        assert each == pytest.approx(expected, rel=1e-5)
