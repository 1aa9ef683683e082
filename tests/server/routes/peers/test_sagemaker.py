"""Who may ask the paths of SageMaker."""

from fake_api import make_app, make_client
from fake_frontend import FakeFrontend

from server.options.server_flags import AccessOptions


async def test_a_platform_sees_that_the_server_is_ready_and_asks_the_model_with_a_key_only() -> None:
    async with make_client(make_app(FakeFrontend(), access=AccessOptions(api_key=["secret"]))) as client:
        assert (await client.get("/ping")).status_code == 200
        assert (await client.post("/invocations", json={"prompt": "hi"})).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await client.post("/invocations", json={"prompt": "hi"}, headers=headers)).status_code == 200
