"""GET /v1/models."""

import httpx
from fake_frontend import FakeFrontend
from media_frontend import let_see


async def test_a_card_tells_which_media_the_model_takes(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    let_see(frontend, max_media_mb=3, limit_mm_per_prompt={"image": 2})
    card = (await client.get("/v1/models/tiny")).json()
    assert card["media"] == {"most": {"image": 2, "video": 16}, "max_bytes": 3 << 20}
