"""Who may ask the paths of SageMaker, and for what."""

import hashlib
from pathlib import Path

from fake_api import make_app, make_client
from fake_frontend import FakeFrontend

from server.options.server_flags import AccessOptions


async def test_a_platform_sees_that_the_server_is_ready_and_asks_the_model_with_a_key_only() -> None:
    async with make_client(make_app(FakeFrontend(), access=AccessOptions(api_key=["secret"]))) as client:
        assert (await client.get("/ping")).status_code == 200
        assert (await client.post("/invocations", json={"prompt": "hi"})).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await client.post("/invocations", json={"prompt": "hi"}, headers=headers)).status_code == 200


async def test_a_key_gets_by_invocations_no_more_than_by_the_endpoint_itself(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"embeds").hexdigest()
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "a"\nsha256 = "{digest}"\ntasks = ["embed"]\n')
    file.chmod(0o600)
    app = make_app(FakeFrontend(), access=AccessOptions(api_key_file=str(file)))
    async with make_client(app, client=("127.0.0.1", 1)) as client:
        headers = {"Authorization": "Bearer embeds"}
        said = [
            await client.post(path, json={"prompt": "hi"}, headers=headers)
            for path in ("/invocations", "/v1/completions", "/completion")
        ]
    assert [each.status_code for each in said] == [403, 403, 403]
    assert said[0].json() == said[1].json()
