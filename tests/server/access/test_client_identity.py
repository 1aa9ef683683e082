"""The owner whose share of the server a request takes, if there are no keys."""

from __future__ import annotations

from typing import Any

import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend, that_embeds_too

from server.access.client_identity import ANYONE, Caller
from server.errors import TooManyRequests
from server.options.server_flags import AccessOptions

COMPLETION = ("/v1/completions", {"prompt": "hi", "max_tokens": 1})
EMBEDDING = ("/v1/embeddings", {"input": ["hi", "you"]})


async def owner_of(
    host: str | None, call: tuple[str, dict[str, Any]] = COMPLETION, fair_between: str = "addresses"
) -> str:
    """The owner that the engine is told for a request from this address; None is a Unix socket."""
    frontend = that_embeds_too()
    app = make_app(frontend, access=AccessOptions(fair_between=fair_between))

    async def from_there(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "client": host and (host, 1)}, receive, send)

    async with make_client(from_there) as client:
        response = await client.post(call[0], json=call[1])
    assert response.status_code == 200, response.text
    assert not frontend.admissions.live, "its places are free again"
    options = frontend.asked[-1][2] if frontend.asked else frontend.pooled[-1][1]
    assert options["weight"] == 1.0
    return str(options["owner"])


@pytest.mark.parametrize("call", [COMPLETION, EMBEDDING])
async def test_addresses_are_owners(call: tuple[str, dict[str, Any]]) -> None:
    assert await owner_of("10.0.0.1", call) == "10.0.0.1"
    assert await owner_of("10.0.0.2", call) == "10.0.0.2"


@pytest.mark.parametrize(
    ("host", "owner"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::9", "2001:db8:1:2::"),
        ("2001:db8:1:3::9", "2001:db8:1:3::"),
        ("fe80::1%eth0", "fe80::"),
        ("odd:address", "odd:address"),
        ("testclient", "testclient"),
    ],
)
async def test_an_ipv6_network_is_one_owner(host: str, owner: str) -> None:
    assert await owner_of(host) == owner


async def test_all_clients_of_a_unix_socket_are_one_owner() -> None:
    assert await owner_of(None) == ""


async def test_addresses_count_for_nothing_if_they_are_not_trusted() -> None:
    assert await owner_of("10.0.0.1", fair_between="none") == ""


async def test_an_address_that_fills_the_server_shuts_out_no_other() -> None:
    frontend = that_embeds_too().with_places(2, queue=2)
    app = make_app(frontend)
    crowd = [frontend.admissions.admit(Caller("10.0.0.1"), 1) for _ in range(4)]
    for host, status in (("10.0.0.1", 503), ("10.0.0.2", 200)):
        async with make_client(app, client=(host, 1)) as client:
            response = await client.post(COMPLETION[0], json=COMPLETION[1])
            assert response.status_code == status, response.text
            assert ("retry-after" in response.headers) == (status == 503)
    assert isinstance(crowd[-1].refusal, TooManyRequests)


async def test_a_request_for_very_many_answers_is_refused() -> None:
    frontend = FakeFrontend()
    app = make_app(frontend)
    async with make_client(app) as client:
        for prompts, n, status in ((8, 128, 200), (9, 128, 400), (256, 5, 400)):
            body = {"prompt": [[1]] * prompts, "n": n, "max_tokens": 1, "seed": 1}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
    assert "at most 1024 answers together, got 256 x 5" in response.json()["error"]["message"]
    assert not frontend.admissions.live


async def test_a_full_server_reads_no_body() -> None:
    frontend = FakeFrontend().with_places(1, queue=0)
    frontend.admissions.admit(ANYONE, 1)
    app = make_app(frontend, access=AccessOptions(fair_between="none"))

    async def body() -> Any:
        raise AssertionError("the body was read")
        yield b""

    async with make_client(app) as client:
        response = await client.post("/v1/completions", content=body())
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "Service Unavailable"
