"""The page in a real browser, over the HTTP API: chat, vectors, live data, keys, loading, phones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from chromium import PROGRAM, Tab, browser
from fake_frontend import FakeFrontend, vectors
from served_app import served

from server.options.access import AccessOptions
from server.page.routes import WATCH
from server.status import Ready, Starting

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")

READY = "document.body?.dataset.ready"
MESSAGES = "[...document.querySelectorAll('#messages .text')].map(one => one.textContent).join('|')"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_complaints(tab: Tab) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    tab.complaints.clear()
    yield
    assert tab.complaints == []


@pytest.fixture
def frontend() -> FakeFrontend:
    frontend = FakeFrontend()
    frontend.serve("generate", "embed")
    frontend.answer_of = lambda item: vectors(np.sin(np.arange(1, 9) * sum(item.tokens)))
    return frontend


def say(tab: Tab, text: str) -> None:
    tab.run(f"document.getElementById('input').value = '{text}'; document.getElementById('input').focus()")
    tab.press("Enter")


def click(tab: Tab, id: str) -> None:
    tab.run(f"document.getElementById('{id}').click()")


def test_a_conversation(tab: Tab, frontend: FakeFrontend) -> None:
    with served(frontend) as url:
        tab.open(url)
        tab.wait(READY)
        say(tab, "hi")
        tab.wait(f"{MESSAGES} === 'hi|Hello, world.'")
        assert "tokens" in tab.wait("document.getElementById('pace').textContent")
        click(tab, "again")
        tab.wait(f"!document.getElementById('again').disabled && {MESSAGES} === 'hi|Hello, world.'")
        tab.run("document.querySelector('#messages button').click()")
        assert tab.run("document.getElementById('input').value") == "hi"
        assert tab.run(MESSAGES) == ""
        tab.run("document.getElementById('option-max_tokens').value = 5")
        say(tab, "again")
        tab.wait(f"{MESSAGES} === 'again|Hello'")
        click(tab, "show-code")
        shown = tab.run("document.getElementById('code-text').textContent")
        assert f"curl '{url}/v1/chat/completions'" in shown
        assert '"max_tokens": 5' in shown


def test_tokens_have_colours_and_alternatives(tab: Tab, frontend: FakeFrontend) -> None:
    with served(frontend) as url:
        tab.open(url)
        tab.wait(READY)
        click(tab, "colours")
        say(tab, "hi")
        tab.wait(f"{MESSAGES} === 'hi|Hello, world.'")
        assert tab.run("document.querySelectorAll('.token.p3').length") == len("Hello, world.")
        tab.run("document.querySelector('.token').focus()")
        assert "60.7 %" in tab.wait(
            "!document.getElementById('tip').hidden && document.getElementById('tip').textContent"
        )
        tab.press("ArrowRight")
        tab.wait("document.activeElement.textContent === 'e'")


def test_an_error_is_shown_beside_its_message(tab: Tab, frontend: FakeFrontend) -> None:
    with served(frontend) as url:
        tab.open(url)
        tab.wait(READY)
        tab.run("document.getElementById('option-temperature').value = -1")
        say(tab, "hi")
        assert "temperature" in tab.wait("document.querySelector('.error')?.textContent")
        tab.complaints.clear()  # the browser notes the status 400


def test_texts_are_compared(tab: Tab, frontend: FakeFrontend) -> None:
    with served(frontend) as url:
        tab.open(f"{url}/#vectors")
        tab.wait(READY)
        tab.run("document.querySelector('#embed [type=submit]').click()")
        tab.wait("document.querySelectorAll('#heat td.number').length === 16")
        assert tab.run("document.querySelector('#heat td.number').textContent") == "1.000"
        assert tab.run("document.querySelectorAll('#map circle').length") == 4


def test_live_data_are_read_only_while_they_are_seen(tab: Tab, frontend: FakeFrontend) -> None:
    with served(frontend) as url:
        tab.open(url)
        tab.wait(READY)
        assert WATCH.watchers == 0
        click(tab, "tab-live")
        tab.wait("document.querySelectorAll('#numbers dd').length === 12")
        tab.wait("document.querySelectorAll('#curves polyline').length === 5")
        assert WATCH.watchers == 1
        click(tab, "tab-play")
        for _ in range(2000):
            if not WATCH.watchers:
                break
            tab.run("new Promise(done => setTimeout(done, 20))")
        assert WATCH.watchers == 0


def test_loading_is_shown_and_ends(tab: Tab, frontend: FakeFrontend) -> None:
    frontend.status = Starting("weights", 0.5)
    with served(frontend) as url:
        tab.open(url)
        tab.wait("document.getElementById('state').textContent.includes('weights, 50 %')")
        frontend.status = Ready()
        tab.wait(READY)
        assert tab.run("document.getElementById('state').hidden")
        tab.complaints.clear()  # the browser notes the status 503


def test_a_key_is_asked_for_until_it_is_right_and_then_kept(tab: Tab, frontend: FakeFrontend) -> None:
    def enter(key: str) -> None:
        tab.wait("document.getElementById('key-dialog').open")
        tab.run(f"document.getElementById('key').value = '{key}'")
        tab.run("document.querySelector('#key-form button').click()")

    with served(frontend, access=AccessOptions(api_key=["secret"])) as url:
        tab.open(url)
        enter("wrong")
        tab.wait("document.getElementById('key-dialog').open")
        enter("secret")
        tab.wait(READY)
        say(tab, "hi")
        tab.wait(f"{MESSAGES} === 'hi|Hello, world.'")
        assert tab.run("Object.values(localStorage).includes('secret')") is False
        tab.run("document.body.dataset.old = 'yes'; location.reload()")
        tab.wait(f"{READY} && !document.body.dataset.old && !document.getElementById('key-dialog').open")
        tab.complaints.clear()  # the browser notes the status 401


def test_tabs_are_changed_by_keys(tab: Tab, frontend: FakeFrontend) -> None:
    with served(frontend) as url:
        tab.open(url)
        tab.wait(READY)
        tab.run("document.getElementById('tab-play').focus()")
        tab.press("ArrowRight")
        tab.wait("document.activeElement.id === 'tab-vectors' && !document.getElementById('vectors').hidden")


@pytest.mark.parametrize("part", ["play", "vectors", "live"])
def test_a_phone_needs_no_scrolling_sideways(tab: Tab, frontend: FakeFrontend, part: str) -> None:
    with served(frontend) as url:
        tab.open(f"{url}/#{part}", width=360)
        tab.wait(READY)
        assert tab.run("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast(tab: Tab, frontend: FakeFrontend, theme: str) -> None:
    script = """(() => {
      document.documentElement.dataset.theme = "%s";
      const style = getComputedStyle(document.documentElement);
      const light = (name) => {
        const hex = style.getPropertyValue(name).trim().replace(/^#(.)(.)(.)$/, "#$1$1$2$2$3$3");
        const parts = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255);
        const [r, g, b] = parts.map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
      return Math.min(ratio("--front", "--back"), ratio("--front", "--box"), ratio("--soft", "--back"),
        ratio("--soft", "--box"), ratio("--on-mark", "--mark"), ratio("--bad", "--back"));
    })()"""
    with served(frontend) as url:
        tab.open(url)
        tab.wait(READY)
        assert tab.run(script % theme) >= 4.5
