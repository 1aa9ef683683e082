"""POST /index_check, over a model whose hidden states are made up."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest
from fake_frontend import FakeFrontend

from models.pooling.config import PoolingConfig, VectorFacts
from models.pooling.sentence_files import Dense
from server.requests.pooling import Item
from server.text.tokenizer import unpack
from worker.protocol import Vectors

TEXTS = [letter * length for length, letter in zip(range(3, 15), "abcdefghijkl", strict=True)]


def states(tokens: list[int]) -> np.ndarray:
    return np.stack([np.random.default_rng(token).standard_normal(8) for token in tokens]).astype("<f4")


@pytest.fixture(autouse=True)
def encoder(frontend: FakeFrontend) -> None:
    def answer(item: Item) -> Vectors:
        assert (item.params.task, item.params.use_activation) == ("token_embed", False)
        found = states(unpack(item.tokens))
        return Vectors(found.tobytes(), found.shape)

    frontend.answer_of = answer
    made = {"embed": VectorFacts("ab", "last", True, 8)}
    frontend.serve("embed", "token_embed", vectors=made, pooling=PoolingConfig())


def body(frontend: FakeFrontend, prompt: str = "", **fields: Any) -> dict[str, Any]:
    rows = [states(frontend.tokenizer.encode(prompt + text)).mean(0) for text in TEXTS]
    vectors = [base64.b64encode((row / np.linalg.norm(row)).astype("<f4").tobytes()).decode() for row in rows]
    samples = [{"text": text, "vector": one} for text, one in zip(TEXTS, vectors, strict=True)]
    return {"samples": samples, **fields}


async def test_what_made_the_vectors(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    answer = (await client.post("/index_check", json=body(frontend))).json()
    assert (answer["matches"], answer["pooling"], answer["normalized"]) == (True, "MEAN", "normalized")
    assert answer["serve"] == ["serve", "org/tiny", "--pooler-config", '{"pooling_type": "MEAN"}']
    assert answer["nearness"] > 0.9999 and answer["as_published"] < 0.999
    assert len(frontend.pooled) == 1, "each text was computed once"


async def test_a_prompt_of_the_request_is_tried(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    answer = await client.post("/index_check", json=body(frontend, "my: ", prompts=["my: "]))
    assert (answer.json()["matches"], answer.json()["prompt"]) == (True, "my: ")


@pytest.mark.parametrize(
    ("vector", "said"),
    [
        ("???", "neither a list of numbers nor base64"),
        ([], "At least 4 texts"),
        ("AACAfw==", "NaN or infinite"),
    ],
)
async def test_hostile_samples(client: httpx.AsyncClient, vector: object, said: str) -> None:
    samples = [{"text": "a", "vector": vector}] * 4
    answer = await client.post("/index_check", json={"samples": samples})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


async def test_models_with_modules_are_for_the_command(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    dense = PoolingConfig(steps=(Dense(in_features=8, out_features=8),))
    frontend.serve("embed", "token_embed", pooling=dense)
    answer = await client.post("/index_check", json=body(frontend))
    assert answer.status_code == 400 and "facet index-check --model" in answer.json()["error"]["message"]
    frontend.serve("embed")
    assert "token_embed" in (await client.post("/index_check", json=body(frontend))).text
