"""What is posted to `/`, as Hugging Face's InferenceClient does, and who may read it."""

import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend

from server.options.server_flags import AccessOptions


@pytest.fixture
def frontend() -> FakeFrontend:
    made = FakeFrontend()
    made.serve("embed", score_type="bi-encoder")
    return made


async def test_the_root_is_read_without_a_key_and_answers_with_one_only(frontend: FakeFrontend) -> None:
    options = AccessOptions(api_key=["secret"])
    async with make_client(make_app(frontend, access=options)) as client:
        got, asked = await client.get("/"), await client.head("/")
        assert (got.status_code, asked.status_code) == (200, 200)
        assert asked.headers["content-length"] == got.headers["content-length"]
        assert (await client.post("/", json={"inputs": "hi"})).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await client.post("/", json={"inputs": "hi"}, headers=headers)).status_code == 200
