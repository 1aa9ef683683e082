"""The page in a real browser, over the HTTP API: chat, vectors, live data, keys, loading, phones."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from chromium import PROGRAM, Tab, browser
from fake_frontend import FakeFrontend, vectors
from media_files import noise, saved
from media_frontend import let_see
from served_app import served

from models.pooling.config import PoolingConfig
from server.access.client_identity import ANYONE
from server.errors import Unavailable
from server.http.error_answers import loading
from server.options.server_config import AccessOptions
from server.page.routes import WATCH

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")

READY = "document.body?.dataset.ready"
IDLE = "document.getElementById('stop').disabled"
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


@contextmanager
def opened(tab: Tab, frontend: FakeFrontend, part: str = "play", **options: int) -> Iterator[str]:
    """The page, open at one of its parts and ready; yields the address of its server."""
    with served(frontend) as url:
        tab.open(f"{url}/#{part}", **options)
        tab.wait(READY)
        yield url


def say(tab: Tab, text: str) -> None:
    tab.run(f"document.getElementById('input').value = '{text}'; document.getElementById('input').focus()")
    tab.press("Enter")


def say_twice(tab: Tab) -> None:
    """A message whose answer has two versions."""
    say(tab, "hi")
    tab.wait(f"{IDLE} && {MESSAGES} === 'hi|Hello, world.'")
    click(tab, "again")
    tab.wait(f"{IDLE} && document.querySelector('.versions:not([hidden])') !== null")


def click(tab: Tab, id: str) -> None:
    tab.run(f"document.getElementById('{id}').click()")


def test_a_conversation(tab: Tab, frontend: FakeFrontend) -> None:
    with opened(tab, frontend) as url:
        say(tab, "hi")
        tab.wait(f"{MESSAGES} === 'hi|Hello, world.'")
        assert "tokens" in tab.wait("document.getElementById('pace').textContent")
        click(tab, "again")
        tab.wait(f"!document.getElementById('again').disabled && {MESSAGES} === 'hi|Hello, world.'")
        click(tab, "clear")
        assert tab.run(MESSAGES) == ""
        tab.run("document.getElementById('option-max_tokens').value = 5")
        say(tab, "again")
        tab.wait(f"{MESSAGES} === 'again|Hello'")
        click(tab, "show-code")
        shown = tab.run("document.getElementById('code-text').textContent")
        assert f"curl '{url}/v1/chat/completions'" in shown
        assert '"max_tokens": 5' in shown


def test_edited_and_repeated_turns_are_branches(tab: Tab, frontend: FakeFrontend) -> None:
    def go(label: str, nth: int = 0) -> None:
        buttons = f"[...document.querySelectorAll('#messages [aria-label={json.dumps(label)}]')]"
        tab.run(f"{buttons}.filter(one => one.checkVisibility())[{nth}].click()")

    with opened(tab, frontend):
        say(tab, "one")
        tab.wait(f"{IDLE} && {MESSAGES} === 'one|Hello, world.'")
        say(tab, "two")
        tab.wait(f"{IDLE} && {MESSAGES} === 'one|Hello, world.|two|Hello, world.'")
        frontend.reply = "Another."
        click(tab, "again")
        tab.wait(f"{IDLE} && {MESSAGES} === 'one|Hello, world.|two|Another.'")
        go("Edit this message as a new branch")
        tab.wait("document.activeElement.value === 'one'")
        tab.run("document.activeElement.value = 'three'")
        tab.press("Enter")
        tab.wait(f"{IDLE} && {MESSAGES} === 'three|Another.'")
        asked, _, _ = frontend.asked[-1]
        assert "one" not in frontend.tokenizer.decode(asked, False)
        go("Earlier version")  # of the first message: its answers come back, the later one shown
        assert tab.run(MESSAGES) == "one|Hello, world.|two|Another."
        go("Earlier version", 1)
        assert tab.run(MESSAGES) == "one|Hello, world.|two|Hello, world."
        places = "[...document.querySelectorAll('.versions:not([hidden]) span')].map(one => one.innerText)"
        assert tab.run(places) == ["1 of 2", "1 of 2"]
        assert tab.run("document.activeElement.getAttribute('aria-label')") == "Later version"
        go("Edit this message as a new branch")
        tab.press("Escape")
        assert tab.run(MESSAGES) == "one|Hello, world.|two|Hello, world."
        say(tab, "go on")  # at the end of the branch that is shown
        tab.wait(f"{IDLE} && {MESSAGES}.endsWith('two|Hello, world.|go on|Another.')")


def test_tokens_have_colours_and_alternatives(tab: Tab, frontend: FakeFrontend) -> None:
    with opened(tab, frontend):
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


WAITING = "[...document.querySelectorAll('#pictures img')].map(one => one.alt).join('|')"
TOLD = "document.getElementById('pace').textContent"


def test_pictures_are_chosen_dropped_pasted_and_removed(tab: Tab, frontend: FakeFrontend) -> None:
    let_see(frontend, max_media_mb=1, limit_mm_per_prompt={"image": 3})
    file = saved(noise(40, 28))
    with opened(tab, frontend):
        tab.run("document.getElementById('files').click = () => { document.body.dataset.asked = 'yes'; }")
        click(tab, "add-pictures")
        assert tab.run("document.body.dataset.asked") == "yes"
        for way in ("choose", "drop", "paste"):
            tab.bring(way, (f"{way}.png", "image/png", file))
        tab.wait(f"{WAITING} === 'choose.png|drop.png|paste.png'")
        tab.wait("[...document.querySelectorAll('#pictures img')].every(one => one.naturalWidth === 40)")
        tab.bring("drop", ("more.png", "image/png", file))
        tab.wait(f"{TOLD} === 'more.png is one too many: a conversation may have 3 pictures.'")
        tab.run("""document.querySelector('[aria-label="Remove drop.png"]').click()""")
        assert tab.run(WAITING) == "choose.png|paste.png"
        assert tab.run("document.activeElement.id") == "input"
        tab.bring("drop", ("big.png", "image/png", bytes(3 << 18)), ("notes.txt", "text/plain", b"hi"))
        told = tab.wait(f"{TOLD}.includes('notes.txt') && {TOLD}")
        assert told.startswith("big.png is too large: pictures of a conversation may have 1 MiB together")
        assert "notes.txt is none of the pictures that can be read: image/jpeg, image/png" in told
        assert tab.run(WAITING) == "choose.png|paste.png"


def test_a_model_of_texts_is_offered_no_pictures(tab: Tab, frontend: FakeFrontend) -> None:
    with opened(tab, frontend):
        assert tab.run("document.getElementById('add-pictures').hidden")
        for way in ("drop", "paste"):
            tab.bring(way, ("a.png", "image/png", saved(noise(40, 28))))
        say(tab, "hi")
        tab.wait(f"{IDLE} && {MESSAGES} === 'hi|Hello, world.'")
        assert tab.run("document.querySelectorAll('img').length") == 0


def test_an_error_is_shown_beside_its_message(tab: Tab, frontend: FakeFrontend) -> None:
    with opened(tab, frontend):
        tab.run("document.getElementById('option-temperature').value = -1")
        say(tab, "hi")
        assert "temperature" in tab.wait("document.querySelector('.error')?.textContent")
        tab.complaints.clear()  # the browser notes the status 400


def test_texts_are_compared(tab: Tab, frontend: FakeFrontend) -> None:
    with opened(tab, frontend, "vectors"):
        tab.run("document.querySelector('#embed [type=submit]').click()")
        tab.wait("document.querySelectorAll('#heat td.number').length === 16")
        assert tab.run("document.querySelector('#heat td.number').textContent") == "1.000"
        assert tab.run("document.querySelectorAll('#map circle').length") == 4


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ('{"city": "Paris"}', "The answer fits the schema."),
        ('{"city": 1}', "The answer does not fit the schema: $.city: is number, not string"),
        ("Paris", "The answer is no JSON"),
    ],
)
def test_an_answer_is_checked_against_the_schema_beside(
    tab: Tab, frontend: FakeFrontend, reply: str, verdict: str
) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    frontend.reply = reply
    with opened(tab, frontend):
        tab.run(f"document.getElementById('schema').value = {json.dumps(json.dumps(schema))}")
        say(tab, "hi")
        shown = tab.wait("document.querySelector('#messages [role=status]')?.textContent")
        assert shown.startswith(verdict)


def test_documents_are_ranked_and_texts_are_classified(tab: Tab, frontend: FakeFrontend) -> None:
    pooling = PoolingConfig(num_labels=2, labels=("dull", "fine"))
    frontend.serve("embed", "classify", score_type="bi-encoder", pooling=pooling)
    with opened(tab, frontend, "vectors"):
        tab.run("document.querySelector('#rerank [type=submit]').click()")
        tab.wait("document.querySelectorAll('#ranked td').length === 6")
        ranked = tab.run("document.getElementById('ranked').innerText")
        assert "puppy" in ranked and "stock market" in ranked
        frontend.answer_of = lambda item: vectors(np.array([0.25, 0.75]))
        tab.run("document.querySelector('#classify [type=submit]').click()")
        tab.wait("document.querySelectorAll('#classes td').length === 3")
        found = tab.run("[...document.querySelectorAll('#classes td')].map(one => one.textContent)")
        assert found == ["What a fine day.", "fine", "0.7500"]


def test_requests_in_flight_are_listed_without_their_texts(tab: Tab, frontend: FakeFrontend) -> None:
    admission = frontend.admissions.admit(ANYONE, 2)
    admission.take_id("cmpl-of-somebody")
    admission.since = time.monotonic() - 7
    with opened(tab, frontend):
        click(tab, "tab-live")
        tab.wait("document.querySelectorAll('#requests td').length === 4")
        cells = "[...document.querySelectorAll('#requests td')].map(one => one.textContent)"
        name, age, answers, state = tab.run(cells)
        assert (name, answers, state) == ("cmpl-of-somebody", "2", "waits")
        assert float(age.removesuffix(" s")) >= 7
        admission.release()
        tab.wait("document.getElementById('requests').textContent === 'None.'")


def test_live_data_are_read_only_while_they_are_seen(tab: Tab, frontend: FakeFrontend) -> None:
    with opened(tab, frontend):
        assert WATCH.watchers == 0
        click(tab, "tab-live")
        tab.wait("document.querySelectorAll('#numbers dd').length === 16")
        tab.wait("document.querySelectorAll('#curves polyline').length === 5")
        assert WATCH.watchers == 1
        click(tab, "tab-play")
        for _ in range(2000):
            if not WATCH.watchers:
                break
            tab.run("new Promise(done => setTimeout(done, 20))")
        assert WATCH.watchers == 0


def test_loading_is_shown_and_ends(tab: Tab, frontend: FakeFrontend) -> None:
    frontend.status = loading("weights", 0.5)
    frontend.unready = Unavailable("The model is loading.", retry_after=1)
    with served(frontend) as url:
        tab.open(url)
        tab.wait("document.getElementById('state').textContent.includes('weights, 50 %')")
        frontend.status, frontend.unready = READY, None
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
    with opened(tab, frontend):
        tab.run("document.getElementById('tab-play').focus()")
        tab.press("ArrowRight")
        tab.wait("document.activeElement.id === 'tab-vectors' && !document.getElementById('vectors').hidden")


@pytest.mark.parametrize("part", ["play", "vectors", "live"])
def test_a_screen_reader_has_a_name_for_everything(tab: Tab, frontend: FakeFrontend, part: str) -> None:
    with opened(tab, frontend, part):
        if part == "play":
            click(tab, "colours")
            say_twice(tab)
        fields = tab.fields()
        assert ("tab", "Play") in fields
        assert [role for role, name in fields if not name and role != "RootWebArea"] == []


def test_the_tab_key_goes_through_the_page_in_its_order(tab: Tab, frontend: FakeFrontend) -> None:
    with opened(tab, frontend):
        tab.run("document.querySelector('.skip').focus()")
        seen: list[str] = []
        while len(seen) < 40 and (not seen or seen[-1] != "send"):
            tab.press("Tab")
            seen.append(tab.run("document.activeElement.id || document.activeElement.tagName"))
        assert seen[:5] == ["tab-play", "model", "theme", "SUMMARY", "system"]
        assert seen[-4:] == ["show-code", "clear", "input", "send"]
        places = tab.run(
            "[...document.querySelectorAll('#options :is(textarea, input, button)')].map(one => one.id)"
        )
        assert [one for one in seen if one in places] == places


@pytest.mark.parametrize("part", ["play", "vectors", "live"])
def test_a_phone_needs_no_scrolling_sideways(tab: Tab, frontend: FakeFrontend, part: str) -> None:
    with opened(tab, frontend, part, width=360):
        if part == "play":
            say_twice(tab)
        if part == "vectors":
            tab.run("document.querySelector('#embed [type=submit]').click()")
            tab.wait("document.querySelectorAll('#map circle').length === 4")
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
    with opened(tab, frontend):
        assert tab.run(script % theme) >= 4.5
