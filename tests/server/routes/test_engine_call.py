"""What a request's head says: its id, which is nobody else's meanwhile, its replica and its priority."""

import asyncio
from typing import Any

import httpx
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend, vectors

from server.access.client_identity import ANYONE
from server.options.server_flags import AccessOptions

CALLS: dict[str, Any] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
}
SAME = {"X-Request-Id": "mine"}


def api(**options: Any) -> tuple[FakeFrontend, httpx.AsyncClient]:
    frontend = FakeFrontend(answer_of=lambda item: vectors([1.0]), per_step=1)
    frontend.serve("generate", "embed")
    access = AccessOptions(fair_between="none")
    app = make_app(frontend, access=access, enable_request_id_headers=True, **options)
    return frontend, make_client(app)


async def test_at_the_same_time_each_has_another_and_the_header_is_theirs() -> None:
    for path, body in CALLS.items():
        frontend, http = api()
        frontend.gate = asyncio.Event()
        tasks = [asyncio.create_task(http.post(path, json=body, headers=SAME)) for _ in range(3)]
        async with asyncio.timeout(60):
            while frontend.running < 3:
                await asyncio.sleep(0.001)
        live = [one.id for owner in frontend.admissions._owners.values() for one in owner.admissions]  # pyright: ignore
        frontend.gate.set()
        responses = await asyncio.gather(*tasks)
        ids = [response.json()["id"] for response in responses]
        assert len(set(ids)) == 3 and sorted(ids) == sorted(live)
        assert all("-mine" in id for id in ids) and sum(id.endswith("-mine") for id in ids) == 1
        assert {response.headers["x-request-id"] for response in responses} == {"mine"}
        assert not frontend.admissions.by_id


async def test_a_stream_has_one_id_in_all_its_chunks() -> None:
    frontend, http = api()
    frontend.admissions.admit(ANYONE, 1).take_id("cmpl-mine")
    body = {**CALLS["/v1/completions"], "stream": True}
    text = (await http.post("/v1/completions", json=body, headers=SAME)).text
    ids = {part.partition('"')[0] for part in text.split('"id":"')[1:]}
    [id] = ids
    assert id.startswith("cmpl-mine-")


async def test_a_refused_request_keeps_no_id() -> None:
    frontend, http = api()
    wrong = {**CALLS["/v1/completions"], "temperature": -1}
    assert (await http.post("/v1/completions", json=wrong, headers=SAME)).status_code == 400
    assert not frontend.admissions.by_id
