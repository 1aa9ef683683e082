"""The page and its stream over a real server: there before the model, and no hindrance to the end."""

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
IDLE = "document.getElementById('stop').hidden"
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
    """Fills in options of the settings, and sends a message."""
    for name, value in options.items():
        tab.run(f"document.getElementById('option-{name}').value = {json.dumps(value)}")
    tab.run(f"document.getElementById('input').value = {json.dumps(text)}")
    tab.run("document.getElementById('input').focus()")
    tab.press("Enter")


def heard(tab: Tab, nth: int) -> str:
    """The nth answer, once it is complete."""
    return tab.wait(f"{IDLE} && {ANSWERS}[{nth}]?.textContent")


WRITTEN = r"""Sort the intervals by their start, then walk through them **once**:

```python
def merge(intervals):
    result = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:  # they overlap
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result
```

| Step | Cost | Why |
|:-----|-----:|:----|
| sort | $O(n \log n)$ | comparisons |
| walk | $O(n)$ | each interval once |

With $n$ intervals of mean length $\bar{x}$, the length of all of them is

$$n\,\bar{x} = \sum_{k=1}^{n} x_k = \int_0^\infty N(t)\,dt$$
"""
"""What a larger model might write: the demo model has not learned Markdown."""


def import_conversation(tab: Tab) -> None:
    """Puts a conversation into the browser by a file such as the page exports, and opens it."""
    pace = "231 tokens \u00b7 48.2 tokens/s \u00b7 first after 61 ms"
    asked = {
        "role": "user",
        "content": "Write a function that merges intervals. What does it cost?",
        "after": -1,
    }
    answer = {"role": "assistant", "content": WRITTEN, "after": 0, "pace": pace}
    conversation = {
        "title": "Merging intervals",
        "messages": [{**asked, "shown": True}, {**answer, "shown": True}],
    }
    tab.run(
        "(field => { const list = new DataTransfer();"
        f"list.items.add(new File([{json.dumps(json.dumps([conversation]))}], 'a.json'));"
        "field.files = list.files; field.dispatchEvent(new Event('change')); })"
        "(document.getElementById('import-file'))"
    )
    tab.wait("(toast => !toast.hidden && (toast.hidden = true))(document.getElementById('toast'))")
    link = "document.querySelector('#conversations [title^=Merging]')"
    tab.wait(f"(one => one && (one.click(), true))({link})")
    tab.wait("document.querySelectorAll('#messages pre, #messages math').length > 1")


def go(tab: Tab, view: str, theme: str) -> None:
    tab.run(
        f"document.documentElement.dataset.theme = '{theme}'; document.getElementById('go-{view}').click()"
    )


@in_chromium
def test_the_page_over_a_real_model(demo: LiveServer, tmp_path: Path) -> None:
    folder = tmp_path if PICTURES is None else Path(PICTURES)
    with browser() as tab:
        tab.open(demo.url, width=1280, height=860)
        tab.wait(READY)
        go(tab, "chat", "light")
        tab.picture(folder / "page-first.png")
        tab.run("document.querySelector('.examples button').click()")
        assert "Paris" in heard(tab, 0)
        import_conversation(tab)
        tab.run("document.getElementById('scroll').scrollTop = 0")
        tab.picture(folder / "page-chat.png")

        go(tab, "chat", "dark")
        _look_closer(tab)
        tab.picture(folder / "page-settings.png")

        go(tab, "compare", "light")
        tab.wait("document.getElementById('ask') !== null")
        tab.run("document.getElementById('ask').requestSubmit()")
        tab.wait("document.querySelectorAll('.map circle').length === 4")
        tab.run("document.getElementById('ask').scrollIntoView()")
        tab.picture(folder / "page-vectors.png")

        go(tab, "live", "dark")
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}
        assert demo.post("/v1/completions", body).status_code == 200
        tab.wait("document.querySelectorAll('#charts polyline').length >= 8")
        if PICTURES is not None:
            _load(demo, 50)
        tab.picture(folder / "page-live.png")

        tab.open(demo.url, width=390, height=844)
        tab.wait(READY)
        go(tab, "chat", "dark")
        import_conversation(tab)
        tab.picture(folder / "page-phone.png")
        assert tab.complaints == []
    pictures = list(folder.glob("page-*.png"))
    assert len(pictures) == 6 and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def _look_closer(tab: Tab) -> None:
    """Opens the settings, and a conversation with coloured tokens and two versions of an answer."""
    tab.run("document.getElementById('open-settings').click()")
    tab.run("document.getElementById('colours').checked = true")
    ask(tab, "What is the capital of France?", seed=3, temperature=1.5, max_tokens=40)
    heard(tab, 0)
    ask(tab, "Name a colour.", seed=4)
    heard(tab, 1)
    tab.run("document.getElementById('option-seed').value = 5")
    tab.run("[...document.querySelectorAll('[aria-label=Regenerate]')].at(-1).click()")
    tab.wait(f"{IDLE} && document.querySelector('.versions:not([hidden])') !== null")
    assert tab.run("document.querySelectorAll('#messages .token').length") > 4
    tab.run("document.querySelector('#messages .token').focus({preventScroll: true})")
    tab.wait("!document.getElementById('tip').hidden")


def _load(server: LiveServer, seconds: int) -> None:
    """Has the server work for a while, now more and now less, so that a picture has curves."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        body = {"prompt": ["Once", "The"], "n": 1 + int(left) % 4, "max_tokens": 120, "ignore_eos": True}
        server.post("/v1/completions", body)
        server.post("/v1/embeddings", {"input": ["a text"] * (int(left) % 7 * 5 + 1)})
        time.sleep(left % 1 / 2)


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
            tab.wait(f"{IDLE} && document.querySelector('.assistant .pace').textContent")
            # It went on in the engine that was started again, or the page says that it broke off.
            whole = tab.run("document.querySelector('.assistant .pace').textContent").startswith(
                "1,500 tokens"
            )
            assert tab.run("document.querySelectorAll('#messages .error').length") == (0 if whole else 1)
            ask(tab, "again", max_tokens=3)
            heard(tab, 1)
        assert server.terminate() == 0
