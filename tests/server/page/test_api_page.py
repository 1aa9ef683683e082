"""The page /docs: Swagger UI with all routes and examples that run, and nothing from other hosts."""

import asyncio
import json
import threading

import pytest
from chromium import Tab
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend
from served_app import served

from server.options.server_flags import AccessOptions
from server.page import api_page
from server.run.app import openapi_schema


async def test_the_page_and_its_files_are_open_to_all_and_keep_the_pages_policy() -> None:
    app = make_app(FakeFrontend(), access=AccessOptions(api_key=["k"]))
    async with make_client(app) as client:
        policy = (await client.get("/")).headers["content-security-policy"]
        for path in ("/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/start.js"):
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["content-security-policy"]) == (200, policy)
        assert (await client.get("/openapi.json")).status_code == 401
        for path in ("/docs/index.html", "/docs/examples.json", "/redoc"):
            headers = {"Authorization": "Bearer k"}
            assert (await client.get(path, headers=headers)).status_code == 404


async def test_the_event_loop_goes_on_while_the_description_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def describe(app: object) -> bytes:
        made.append(threading.get_ident())
        return b"{}"

    monkeypatch.setattr(api_page, "_describe", describe)
    async with make_client(make_app(FakeFrontend())) as client:
        answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    [thread] = made
    assert thread != threading.get_ident()


@pytest.mark.slow(2)
def test_every_route_has_a_group_and_says_what_it_does() -> None:
    for path, methods in openapi_schema()["paths"].items():
        for method, operation in methods.items():
            [group] = operation["tags"]
            words = operation["summary"].split()
            assert group in api_page.GROUPS, (method, path)
            assert not all(word.istitle() for word in words), f"{method} {path} has no doc string"


@pytest.mark.slow(2)
async def test_every_body_has_an_example_that_names_the_model() -> None:
    async with make_client(make_app(FakeFrontend())) as client:
        described = (await client.get("/openapi.json")).json()
    for path, methods in described["paths"].items():
        for operation in methods.values():
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                assert kind != "application/json" or body["example"].get("model", "org/tiny") == "org/tiny", (
                    path
                )
    assert described["tags"][0]["name"] == "Chat"


def test_a_browser_shows_it_and_runs_an_example_with_a_key(tab: Tab, model: FakeFrontend) -> None:
    row = "document.querySelector('[id*=_v1_chat_completions_post]')"
    with served(model, access=AccessOptions(api_key=["k"])) as url:
        tab.open(f"{url}/docs")
        tab.wait("document.getElementById('reason').textContent.includes('API key')")
        assert len(tab.complaints) == 1 and "401" in tab.complaints.pop()  # the browser tells of each one
        tab.run("document.getElementById('key').value = 'k'")
        tab.run("document.querySelector('#ask button').click()")
        tab.wait(f"{row} !== null")
        tab.run(f"{row}.querySelector('.opblock-summary-control').click()")
        tab.wait(f"{row}.querySelector('.execute') !== null")
        tab.run(f"{row}.querySelector('.execute').click()")
        status = tab.wait(
            f"{row}.querySelector('.live-responses-table tbody .response-col_status')?.innerText"
        )
        loaded = tab.run("performance.getEntriesByType('resource').map((one) => one.name)")
    assert status.startswith("200")
    assert loaded and all(name.startswith(f"{url}/") for name in loaded), json.dumps(loaded)
