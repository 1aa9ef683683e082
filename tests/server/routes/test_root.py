"""What is posted to `/`, as Hugging Face's InferenceClient does, and who may read it."""

from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client, post
from fake_frontend import FakeFrontend, vectors

from server.options.server_config import AccessOptions


@pytest.fixture
def frontend() -> FakeFrontend:
    made = FakeFrontend()
    made.serve("embed", score_type="bi-encoder")
    return made


async def test_models_that_embed(client: httpx.AsyncClient) -> None:
    for inputs in ("hi", ["hi", "ho"]):
        assert await post(client, "/", inputs=inputs) == await post(client, "/embed", inputs=inputs)
    compared = {"source_sentence": "a", "sentences": ["a", "b"]}
    same = await post(client, "/similarity", inputs=compared, parameters={})
    assert await post(client, "/", inputs=compared, parameters={}) == same


async def test_models_that_rerank(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.serve("classify", score_type="cross-encoder")
    frontend.answer_of = lambda item: vectors([0.25])
    ranked = await post(client, "/rerank", "tei", query="a", texts=["b", "c"])
    assert await post(client, "/", query="a", texts=["b", "c"]) == ranked


async def test_models_that_classify(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.serve("classify")
    frontend.answer_of = lambda item: vectors([0.25, 0.75])
    assert await post(client, "/", inputs="hi", parameters={}) == await post(client, "/predict", inputs="hi")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"inputs": 5}, "inputs"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 3}}, "parameters"),
        ({}, "inputs"),
    ],
)
async def test_a_wrong_body_gets_one_sentence(
    client: httpx.AsyncClient, body: dict[str, Any], word: str
) -> None:
    response = await client.post("/", json=body)
    assert response.status_code == 400 and word in response.json()["error"]["message"]


async def test_a_model_that_only_generates_names_its_endpoint(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.serve("generate")
    response = await client.post("/", json={"inputs": "hi"})
    assert response.status_code == 400 and "POST /v1/completions" in response.json()["error"]["message"]


async def test_the_root_is_read_without_a_key_and_answers_with_one_only(frontend: FakeFrontend) -> None:
    options = AccessOptions(api_key=["secret"])
    async with make_client(make_app(frontend, access=options)) as client:
        got, asked = await client.get("/"), await client.head("/")
        assert (got.status_code, asked.status_code) == (200, 200)
        assert asked.headers["content-length"] == got.headers["content-length"]
        assert (await client.post("/", json={"inputs": "hi"})).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await client.post("/", json={"inputs": "hi"}, headers=headers)).status_code == 200


async def test_options_that_bring_a_path_are_named() -> None:
    async with make_client(make_app(FakeFrontend(), disable_page=True)) as client:
        page = await client.get("/")
        assert (
            page.status_code == 404 and "--disable-page has turned it off" in page.json()["error"]["message"]
        )
        order = await client.post("/collective_rpc", json={})
        assert order.status_code == 404 and "with --server-dev-mode" in order.json()["error"]["message"]
