"""The page and its stream over a real server: there before the model, and no hindrance to the end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chromium import PROGRAM, Tab, browser
from live import SMALL, LiveServer, starting, wait_until

from server.terminal.server_client import ServerClient

in_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
READY = "document.body?.dataset.ready"
IDLE = "document.getElementById('stop').disabled"
ANSWERS = "document.querySelectorAll('#messages li:not(.user) .text')"
PICTURES = os.environ.get("PAGE_PICTURES")
"""The folder for the pictures of docs/page.md, which `make pictures` names; other runs keep none."""


def states(lines: Iterator[str]) -> Iterator[str]:
    return (json.loads(line[6:])["state"] for line in lines if line.startswith("data: {"))


def answers(server: LiveServer) -> bool:
    try:
        return server.get("/").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_the_stream_tells_of_loading_and_of_the_end() -> None:
    with starting("demo", *SMALL) as server:
        wait_until(lambda: answers(server), 60, server.output)
        with httpx.stream("GET", f"{server.url}/live/events", timeout=60) as response:
            seen = states(response.iter_lines())
            while (state := next(seen)) != "ready":
                assert state == "loading"
            server.process.terminate()
            assert list(seen)[-1] in ("draining", "dead")  # by how far it has got within a second
        assert server.terminate() == 0


def test_a_stream_that_is_left_ends_at_the_server(demo: LiveServer) -> None:
    with ServerClient(demo.url) as server:
        events = server.stream(
            "/v1/completions", {"prompt": "a", "max_tokens": 100, "stream": True, "ignore_eos": True}
        )
        next(events)
        events.close()  # pyright: ignore[reportAttributeAccessIssue]
        wait_until(lambda: demo.get("/load").json() == {"server_load": 0}, 60, lambda: "it goes on")
        assert server.get("/v1/models")["data"]  # over another connection


def ask(tab: Tab, text: str, **options: str | float) -> None:
    """Fills in options of Play, and sends a message."""
    for name, value in options.items():
        tab.run(f"document.getElementById('option-{name}').value = {json.dumps(value)}")
    tab.run(f"document.getElementById('input').value = {json.dumps(text)}")
    tab.run("document.getElementById('input').focus()")
    tab.press("Enter")


@in_chromium
def test_the_page_over_a_real_model(demo: LiveServer, tmp_path: Path) -> None:
    folder = tmp_path if PICTURES is None else Path(PICTURES)
    with browser() as tab:
        tab.open(demo.url, width=1100, height=760)
        tab.wait(READY)
        tab.run("document.documentElement.dataset.theme = 'light'")
        tab.run("document.getElementById('colours').checked = true")
        ask(tab, "What is the capital of France?", seed=3, temperature=1.5, max_tokens=40)
        tab.wait(f"{IDLE} && {ANSWERS}[0]?.textContent")
        ask(tab, "Name a colour.", seed=4)
        tab.wait(f"{IDLE} && {ANSWERS}[1]?.textContent")
        tab.run("document.getElementById('option-seed').value = 5")
        tab.run("document.getElementById('again').click()")
        tab.wait(f"{IDLE} && document.querySelector('.versions:not([hidden])') !== null")
        assert tab.run("document.querySelectorAll('#messages .token').length") > 4
        tab.run("scrollTo(0, 0); document.querySelector('#messages .token').focus({preventScroll: true})")
        tab.wait("!document.getElementById('tip').hidden")
        tab.picture(folder / "page-play.png")

        tab.run("document.getElementById('tab-vectors').click()")
        tab.run("document.querySelector('#embed [type=submit]').click()")
        tab.wait("document.querySelectorAll('#map circle').length === 4")
        tab.run("document.querySelector('#embed [type=submit]').scrollIntoView()")
        tab.picture(folder / "page-vectors.png")

        tab.run("document.documentElement.dataset.theme = 'dark'")
        tab.run("document.getElementById('tab-live').click(); scrollTo(0, 0)")
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}
        assert demo.post("/v1/completions", body).status_code == 200
        tab.wait(
            "[...document.querySelectorAll('#numbers div')].some(one => /^Running\\n/.test(one.innerText))"
        )
        if PICTURES is not None:
            _load(demo, 12)
        tab.picture(folder / "page-live.png")

        tab.open(demo.url, width=360, height=640)
        tab.wait(READY)
        tab.run("document.documentElement.dataset.theme = 'dark'")
        ask(tab, "What is the capital of France?", seed=3)
        tab.wait(f"{IDLE} && {ANSWERS}[0]?.textContent")
        tab.picture(folder / "page-phone.png")
        assert tab.complaints == []
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("page-*.png"))
    assert len(list(folder.glob("page-*.png"))) == 4


def _load(server: LiveServer, seconds: int) -> None:
    """Has the server work for a while, so that a picture has curves."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        server.post(
            "/v1/completions", {"prompt": ["Once", "The"], "n": 4, "max_tokens": 120, "ignore_eos": True}
        )


@in_chromium
@pytest.mark.slow(3)
def test_an_engine_that_is_killed_in_the_middle_of_an_answer() -> None:
    with starting("demo", *SMALL) as server:
        with browser() as tab:
            wait_until(lambda: answers(server), 60, server.output)
            tab.open(server.url)  # before the model is there
            tab.wait(READY)
            tab.run("""document.getElementById('more').value = '{"ignore_eos": true}'""")
            ask(tab, "hi", max_tokens=1500, temperature=0)
            tab.wait(f"{ANSWERS}[0]?.textContent")
            os.kill(server.engine_pid(), signal.SIGKILL)
            tab.wait(f"{IDLE} && document.getElementById('pace').textContent")
            # It went on in the engine that was started again, or the page says that it broke off.
            whole = tab.run("document.getElementById('pace').textContent").startswith("1500 tokens")
            assert tab.run("document.querySelectorAll('#messages .error').length") == (0 if whole else 1)
            ask(tab, "again", max_tokens=3)
            tab.wait(f"{IDLE} && {ANSWERS}[1]?.textContent")
        assert server.terminate() == 0
