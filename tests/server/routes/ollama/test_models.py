"""What Ollama's API tells of models, and that it can be left out, or need a key."""

from datetime import datetime
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client, post
from fake_frontend import FakeFrontend

from server.options.server_config import AccessOptions

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": False}


async def get(client: httpx.AsyncClient, path: str) -> Any:
    response = await client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_names_and_what_runs(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    listed = (await get(client, "/api/tags"))["models"]
    assert [model["name"] for model in listed] == ["org/tiny:latest", "tiny:latest"]
    first = listed[0]
    assert first["model"] == first["name"] and len(first["digest"]) == 64
    assert first["details"]["family"] and first["details"]["families"] == [first["details"]["family"]]
    assert datetime.fromisoformat(first["modified_at"]).timestamp() == frontend.facts.created
    [running] = (await get(client, "/api/ps"))["models"]
    assert running["context_length"] == 4096 and running["size"] >= first["size"]
    assert datetime.fromisoformat(running["expires_at"]).year == 9999
    assert (await get(client, "/api/version"))["version"].count(".") == 2


async def test_a_model_is_shown(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.serve("generate", "embed")
    shown = await post(client, "/api/show", model="tiny")
    assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 4096
    assert shown["model_info"][f"{family}.embedding_length"] == 8
    assert shown == await post(client, "/api/show", name="tiny:latest", verbose=True)
    response = await client.post("/api/show", json={"model": "none"})
    assert (response.status_code, "none" in response.json()["error"]) == (404, True)


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "delete"])
async def test_models_stay_as_they_are(client: httpx.AsyncClient, path: str) -> None:
    method = "DELETE" if path == "delete" else "POST"
    response = await client.request(method, f"/api/{path}", json={"model": "tiny"})
    assert response.status_code == 501
    assert f"/api/{path} is not here" in response.json()["error"]


@pytest.mark.parametrize("name", ["tiny:latest", "org/tiny", "tgi", "tei", "dummy"])
async def test_other_names_mean_the_served_model(client: httpx.AsyncClient, name: str) -> None:
    answer = await post(client, "/v1/chat/completions", **{**CHAT, "model": name})
    assert answer["model"] == "org/tiny"
    assert (await client.get(f"/v1/models/{name}")).status_code == 200
    assert (await client.get(f"/v1/models/{name}x")).status_code == 404


async def test_the_api_can_be_left_out() -> None:
    async with make_client(make_app(FakeFrontend(), ollama=False)) as client:
        for response in (await client.post("/api/chat", json=CHAT), await client.get("/api/tags")):
            assert response.status_code == 404
            assert "is not served: --no-ollama has turned it off." in response.json()["error"]
        unknown = await client.get("/api/none")
        assert unknown.status_code == 404 and "--ollama" not in unknown.json()["error"]


async def test_a_key_is_needed_if_there_are_any() -> None:
    async with make_client(make_app(FakeFrontend(), access=AccessOptions(api_key=["secret"]))) as client:
        for path in ("/api/tags", "/api/version", "/api/ps"):
            assert (await client.get(path)).status_code == 401
        refused = await client.post("/api/chat", json=CHAT)
        assert refused.status_code == 401 and "API key" in refused.json()["error"]
        headers = {"Authorization": "Bearer secret"}
        assert (await client.post("/api/chat", json=CHAT, headers=headers)).status_code == 200
