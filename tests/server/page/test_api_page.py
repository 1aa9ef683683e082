"""The page /docs: everything there is, and nothing from other hosts."""

import asyncio
import re
import threading

import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend

from server.page import api_page
from server.run.app import openapi_schema
from server.schemas.chat import ChatRequest


@pytest.mark.slow(2)
async def test_the_page_needs_no_script_and_no_other_host() -> None:
    async with make_client(make_app(FakeFrontend())) as client:
        page = await client.get("/docs")
        linked = re.findall(r'<a href="([^"#]+)"', page.text)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"<script|<link|<img|src=|//|@import|url\(", page.text)
        assert linked == ["openapi.json"]
        assert (await client.get("/" + linked[0])).status_code == 200
        assert (await client.get("/redoc")).status_code == 404


async def test_the_event_loop_goes_on_while_the_description_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def describe(app: object) -> tuple[bytes, str]:
        made.append(threading.get_ident())
        return b"{}", ""

    monkeypatch.setattr(api_page, "_describe", describe)
    async with make_client(make_app(FakeFrontend())) as client:
        answers = await asyncio.gather(*(client.get(path) for path in ("/openapi.json", "/docs") * 2))
    assert [answer.status_code for answer in answers] == [200] * 4
    [thread] = made
    assert thread != threading.get_ident()


@pytest.mark.slow(2)
def test_every_route_is_linked_and_every_field_is_there() -> None:
    schema = openapi_schema()
    page = api_page.api_page(schema)
    anchors = re.findall(r'<h2 id="([^"]+)"', page)
    assert len(set(anchors)) == len(anchors) == sum(map(len, schema["paths"].values()))
    assert re.findall(r'<a href="#([^"]+)"', page) == anchors
    [chat] = re.findall(r'<h2 id="post-v1-chat-completions">.*?(?=<h2)', page)
    others = sorted([*ChatRequest.other_names, *ChatRequest.foreign])
    assert re.findall(r"<tr><td><code>(\w+)</code>", chat) == [*ChatRequest.model_fields, *others]


def test_texts_are_escaped() -> None:
    operation = {"summary": "<b>`a<b`", "responses": {}}
    schema = {"info": {"title": "<i>", "version": "1"}, "paths": {"/<u>": {"get": operation}}}
    page = api_page.api_page(schema)
    assert "&lt;b&gt;<code>a&lt;b</code>" in page and "&lt;i&gt; 1" in page and "/&lt;u&gt;" in page
    assert not re.search("<b>`|<i>|<u>", page)
