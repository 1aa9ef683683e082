"""The page at /, its files, and the stream of what the server does."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend
from served_app import served

from engine_core.client.replica import Replica
from engine_core.engine_stats import Stats
from server.errors import Status, loading
from server.options.server_flags import AccessOptions
from server.page import routes as live
from server.page.joined_scripts import join_scripts
from server.page.routes import WATCH, TooManyWatchers, Watch, live_status, page_files

MOST_BYTES = 185_000
HANDED_ON = rb'import { m\d+ } from "\.\.?/app.js";\nexport const { .* } = m\d+;\n'
"""A script that is joined with the first one: what is left at its own address."""


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


async def get(frontend: FakeFrontend, path: str, **options: Any) -> httpx.Response:
    async with make_client(make_app(frontend, **options)) as client:
        return await client.get(path)


async def test_the_page_allows_nothing_from_elsewhere(frontend: FakeFrontend) -> None:
    page = await get(frontend, "/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert rules["img-src"] == "'self' data:"
    assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")
    assert page.headers["cache-control"] == "no-cache"


async def test_files_have_a_digest_in_their_address_and_are_kept(frontend: FakeFrontend) -> None:
    page = await get(frontend, "/")
    addresses = set(re.findall(r'(?:src|href)="(page/[^"]+)"', page.text))
    named = {address.split("/", 2)[2] for address in addresses}
    # One script and one style: a browser asks for each file anew, and learns late what a script imports.
    assert named == {"app.js", "style.css", "icon.svg"}
    assert imported_by("app.js") == set()
    # The others come when they are needed: for a view, or once the first screen is there.
    files = {name: content for name, (content, _) in page_files().files.items() if name.endswith(".js")}
    later = {name for name, content in files.items() if not re.fullmatch(HANDED_ON, content)}
    assert later == {
        "app.js",
        "chat/code.js",
        "chat/pdf.js",
        *map("tasks/{}.js".format, ("tasks", "bars", "decide", "hear", "map", "vector_math")),
        *map("live/{}.js".format, ("live", "charts", "quantile")),
        *map("text/{}.js".format, ("markdown", "inline", "highlight", "tex", "tex_symbols")),
    }
    for address in addresses:
        file = await get(frontend, "/" + address)
        assert file.status_code == 200
        assert "immutable" in file.headers["cache-control"]
        assert file.headers["x-content-type-options"] == "nosniff"
    stale = await get(frontend, "/page/0123456789abcdef/app.js")
    assert (stale.status_code, stale.json()["error"]["type"]) == (404, "NotFoundError")


def imported_by(name: str) -> set[str]:
    """All scripts that one imports as it starts, and those that they import."""
    found, waiting = set[str](), [name]
    for one in waiting:
        content, _ = page_files().files[one]
        paths = re.findall(r'^(?:import|export) .*from "(\.[^"]+)"', content.decode(), re.MULTILINE)
        new = {os.path.normpath(Path(one).parent / path) for path in paths} - found
        found |= new
        waiting += new
    return found


def test_modules_import_files_that_are_there() -> None:
    files = page_files().files
    for name, (content, _) in files.items():
        later = re.findall(r'import\("(\.[^"]+)"\)', content.decode()) if name.endswith(".js") else []
        for path in later:
            assert imported_by(os.path.normpath(Path(name).parent / path)) <= files.keys(), name


@pytest.mark.parametrize(
    "line",
    ['import a from "./b.js";', "export default 3;", 'import { a }\n  from "./b.js";', "import(`./b.js`)"],
)
def test_a_script_that_would_not_be_joined_is_told(line: str) -> None:
    with pytest.raises(ValueError, match=r"app\.js: .* is not written as"):
        join_scripts({"app.js": f"{line}\n", "b.js": "export const a = 1;\n"}, "app.js")


def test_the_page_is_small_and_refers_to_nothing_outside() -> None:
    page = page_files()
    texts = {
        "index.html": page.html.decode(),
        **{name: text.decode() for name, (text, _) in page.files.items()},
    }
    assert sum(len(text.encode()) for text in texts.values()) <= MOST_BYTES
    names = {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1998/Math/MathML",
    }  # of formats: nothing is fetched
    for name, text in texts.items():
        assert set(re.findall(r"https?://[\w.-]+[^\s\"'`)]*", text)) <= names, name
        assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|eval|Function)\b", text), name
    html = texts["index.html"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", html)


def test_every_field_has_a_label_and_every_description_is_there() -> None:
    html = page_files().html.decode()
    ids = set(re.findall(r'\bid="([^"]+)"', html))
    for kind in ("for", "aria-describedby", "aria-controls", "aria-labelledby"):
        assert set(re.findall(rf'\b{kind}="([^"]+)"', html)) <= ids
    labelled = set(re.findall(r'\bfor="([^"]+)"', html)) | {"model"}  # which has an aria-label
    fields = set(re.findall(r'<(?:textarea|input|select)[^>]*\bid="([^"]+)"', html))
    assert fields <= labelled
    files = page_files().files.items()
    script = "".join(content.decode() for name, (content, _) in files if name.endswith(".js"))
    made = set(re.findall(r'\bid: "([\w-]+)"', script)) | set(re.findall(r'area\("(\w+)"', script))
    assert set(re.findall(r'byId\("([\w-]+)"\)', script)) <= ids | made


async def test_the_page_can_be_left_out(frontend: FakeFrontend) -> None:
    assert (await get(frontend, "/", disable_page=True)).status_code == 404
    page = page_files()
    assert (await get(frontend, f"/page/{page.digest}/app.js", disable_page=True)).status_code == 404


async def test_the_page_comes_without_a_key_and_the_stream_does_not(frontend: FakeFrontend) -> None:
    access = AccessOptions(api_key=["secret"])
    assert (await get(frontend, "/", access=access)).status_code == 200
    assert (await get(frontend, f"/page/{page_files().digest}/app.js", access=access)).status_code == 200
    assert (await get(frontend, "/live/events", access=access)).status_code == 401


async def test_the_chat_is_seen_before_a_script_has_run_if_the_model_writes(frontend: FakeFrontend) -> None:
    chat = '<section id="chat" aria-label="Chat"'
    assert f"{chat}>" in (await get(frontend, "/")).text
    frontend.serve("embed")
    assert f"{chat} hidden>" in (await get(frontend, "/")).text


async def test_the_page_is_there_while_the_model_loads(frontend: FakeFrontend) -> None:
    frontend.status = loading("weights", 0.5)
    page = await get(frontend, "/")
    assert page.status_code == 200 and '<section id="chat" aria-label="Chat" hidden>' in page.text


def replica(number: int, **numbers: Any) -> Replica:
    made = Replica(number)
    zero = dict.fromkeys(("running", "waiting", "prefix_queries", "prefix_hits", "preemptions"), 0)
    made.stats = Stats(**{**zero, "kv_usage": 0.0, "steps": 0, "step_tokens": 0, **numbers})
    return made


def test_a_look_tells_state_counts_and_replicas(frontend: FakeFrontend) -> None:
    frontend.metrics.replicas = lambda: [replica(0, running=2, kv_usage=0.5), Replica(1)]
    frontend.metrics.count_tokens(7, 3)
    frontend.metrics.first_token.observe(0.03)
    frontend.status = loading("weights", 0.25)
    now = live_status(frontend)  # pyright: ignore[reportArgumentType]
    assert (now.state, now.stage, now.progress) == ("loading", "weights", 0.25)
    assert (now.prompt_tokens, now.generation_tokens) == (7, 3)
    assert [(one.number, one.state, one.running, one.cache) for one in now.replicas] == [
        (0, "starts", 2, 0.5),
        (1, "starts", 0, 0.0),
    ]
    assert now.ranks == 1
    assert now.first_token is not None
    assert sum(now.first_token.counts) == 1
    assert len(now.first_token.counts) == len(now.first_token.bounds) + 1


async def test_a_look_lists_the_oldest_requests_by_their_ids(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_REQUESTS", 1)
    frontend.delay = 3600.0
    async with make_client(make_app(frontend)) as client:
        body = {"prompt": "a secret", "n": 2}
        asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
        while len(frontend.asked) < 2:
            await asyncio.sleep(0)
        [found] = live_status(frontend).requests  # pyright: ignore[reportArgumentType]
        assert found.id.startswith("cmpl-") and found.age > 0
        assert (found.answers, found.begun) == (2, False)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    assert not live_status(frontend).requests  # pyright: ignore[reportArgumentType]


async def test_a_stream_ends_when_the_server_does(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SECONDS", 0.0)
    watch = Watch()
    stream = watch.begin(frontend)  # pyright: ignore[reportArgumentType]
    assert json.loads((await anext(stream)).removeprefix(b"data: "))["state"] == "ready"
    assert watch.watchers == 1
    frontend.status = Status("draining", "draining", fraction=0.0, refuses=True)
    assert (await anext(stream)).endswith(b"data: [DONE]\n\n")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert watch.watchers == 0


async def test_watchers_are_bounded(frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_WATCHERS", 1)
    watch = Watch()
    stream = watch.begin(frontend)  # pyright: ignore[reportArgumentType]
    await anext(stream)
    with pytest.raises(TooManyWatchers):
        watch.begin(frontend)  # pyright: ignore[reportArgumentType]
    await stream.aclose()
    assert watch.watchers == 0


async def test_a_page_that_is_closed_is_watched_for_no_longer(frontend: FakeFrontend) -> None:
    def watch_once(url: str) -> None:
        with httpx.stream("GET", f"{url}/live/events", timeout=60) as response:
            assert next(response.iter_lines()).startswith("data: {")
            assert WATCH.watchers == 1

    with served(frontend) as url:
        await asyncio.to_thread(watch_once, url)
        async with asyncio.timeout(60):
            while WATCH.watchers:
                await asyncio.sleep(0.01)
