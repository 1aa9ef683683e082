"""GET /v1/models."""

import httpx
import pytest
from fake_frontend import FakeFrontend
from media_frontend import let_see

from server.errors import Unavailable


async def test_every_name_has_a_card(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["org/tiny", "tiny"]
    card = listed["data"][1]
    [permission] = card.pop("permission")
    assert card == {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "facet",
        "root": "org/tiny",
        "parent": None,
        "max_model_len": 128,
        "tasks": ["generate"],
        "quantization": None,
        "embedding_space": None,
        "media": None,
    }
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"] is True


async def test_a_card_tells_which_media_the_model_takes(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    let_see(frontend, max_media_mb=3, limit_mm_per_prompt={"image": 2})
    card = (await client.get("/v1/models/tiny")).json()
    assert card["media"] == {"most": {"image": 2, "video": 16}, "max_bytes": 3 << 20}


async def test_a_slash_behind_the_list_names_no_model(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()


@pytest.mark.parametrize("name", ["tiny", "org/tiny"])
async def test_one_model(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/v1/models/{name}")).json()["id"] == name


async def test_another_model(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models/other/model")
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


async def test_while_loading(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.unready = Unavailable("still loading", retry_after=2)
    response = await client.get("/v1/models")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
