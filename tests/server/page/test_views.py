"""The page's other views and its frame: forms of kinds of models, Live, loading, keys, phones, the picker."""

import json
import time

import numpy as np
import pytest
from chromium import Tab
from fake_frontend import FakeFrontend, vectors
from page_driver import IDLE, READY, click, fill, hear, module, opened, say
from served_app import served
from sounds import noise, written
from speech_frontend import let_transcribe, says

from engine_core.protocol import Failed
from models.pooling.config import PoolingConfig
from server.access.client_identity import ANYONE
from server.errors import READY as SERVER_READY
from server.errors import Unavailable, loading
from server.options.server_flags import AccessOptions
from server.page.routes import WATCH

VIEWS = "[...document.querySelectorAll('.views li:not([hidden])')].map(one => one.innerText.trim()).join('|')"


def test_questions_about_a_text_are_answered_with_bars(tab: Tab, model: FakeFrontend) -> None:
    figures = "[...document.querySelectorAll('#output figure')].map(one => one.innerText.split('\\n'))"
    with opened(tab, model, "decide"):
        click(tab, "#ask [type=submit]")
        tab.wait("document.querySelectorAll('#output figure').length === 3")
        refund, team, anger = tab.run(figures)
        assert (refund[0], refund[1::2]) == ("The customer asks for money back.", ["Yes", "No"])
        assert (team[0], team[1::2]) == ("Which team should answer?", ["billing", "technical", "sales"])
        assert anger[1:7:2] == ["calm", "annoyed", "furious"]
        assert anger[-1].startswith("The mean level is ") and anger[-1].endswith(
            ", where calm is 0 and furious is 2."
        )
        for one in (refund, team, anger):
            assert sum(float(share[:-2]) for share in one[2:8:2]) == pytest.approx(100, abs=0.2)
        model.told, model.tell_errors = [], {1: Failed(0, 500, "it broke")}
        click(tab, "#ask [type=submit]")
        told = tab.wait("document.querySelector('#output figure .error')?.textContent")
        assert told.startswith("The model could not answer this question.")
        assert tab.run("document.querySelectorAll('#output .bars').length") == 2


def test_questions_are_added_changed_and_removed(tab: Tab, model: FakeFrontend) -> None:
    legends = "[...document.querySelectorAll('#questions legend')].map(one => one.textContent).join('|')"
    with opened(tab, model, "decide"):
        click(tab, "#ask .row [type=button]:not(.icon)")
        assert tab.run("document.activeElement.closest('li').innerText").startswith("Question 4")
        tab.run("document.activeElement.value = 'Is it urgent?'")
        for _ in range(3):
            click(tab, "#questions [aria-label='Remove this question']")
        assert tab.run(legends) == "Question 1"
        assert tab.run("document.activeElement.value") == "Is it urgent?"
        assert tab.run("document.querySelector('#questions button').disabled")
        kind = "document.querySelector('#questions select')"
        tab.run(f"{kind}.value = 'choice'; {kind}.dispatchEvent(new Event('change'))")
        tab.run("document.querySelector('#questions textarea').value = 'today'")
        click(tab, "#ask [type=submit]")
        told = tab.wait("document.querySelector('#output .error')?.textContent")
        assert "Question 1" in told and "give 2 to 255 choices, got 1" in told
        tab.complaints.clear()  # the browser notes the status 400


def test_texts_are_compared(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model, "compare"):
        click(tab, "#ask [type=submit]")
        tab.wait("document.querySelectorAll('.heat td.number').length === 16")
        assert tab.run("document.querySelector('.heat td.number').textContent") == "1.000"
        assert tab.run("document.querySelectorAll('.map circle').length") == 4
        click(tab, ".chips button", 1)  # an example fills the form, and runs it
        tab.wait("document.querySelector('.heat tbody th').innerText.includes('Good morning')")


def test_a_model_that_writes_says_that_it_was_not_trained_to_compare(tab: Tab, model: FakeFrontend) -> None:
    notice = "document.querySelector('#task .notice')?.textContent"
    with opened(tab, model, "rank"):
        told = tab.wait(notice)
        assert told.startswith("org/tiny was trained to write, and not to rank documents")
        assert "facet serve minilm" in told
    model.serve("embed", score_type="bi-encoder")
    with opened(tab, model, "compare"):
        tab.wait("document.querySelectorAll('.chips button').length === 3")
        assert tab.run(notice) is None


def test_a_reranker_begins_with_its_form(tab: Tab, model: FakeFrontend) -> None:
    model.serve("classify", score_type="cross-encoder", pooling=PoolingConfig(num_labels=1))
    model.answer_of = lambda item: vectors(np.array([len(item.tokens) / 100]))
    with opened(tab, model):
        assert tab.run(VIEWS) == "Rank documents|Live"
        click(tab, "#ask [type=submit]")
        assert "ranks documents" in tab.run("document.getElementById('task').innerText")
        tab.wait("document.querySelectorAll('.bars li').length === 3")
        assert "1. Cats like to sleep in the sun." in tab.run("document.querySelector('.bars').innerText")


def test_a_classifier_names_its_classes(tab: Tab, model: FakeFrontend) -> None:
    model.serve("classify", pooling=PoolingConfig(num_labels=2, labels=("dull", "fine")))
    model.answer_of = lambda item: vectors(np.array([0.25, 0.75]))
    with opened(tab, model):
        assert tab.run(VIEWS) == "Classify texts|Live"
        fill(tab, "classified", "What a fine day.")
        click(tab, "#ask [type=submit]")
        tab.wait("document.querySelectorAll('.bars li').length === 2")
        shown = tab.run("document.getElementById('output').innerText").split("\n")
        assert shown[:5] == ["What a fine day.", "fine", "75.0 %", "dull", "25.0 %"]


def test_a_recording_is_transcribed_from_a_file_and_from_the_microphone(
    tab: Tab, model: FakeFrontend
) -> None:
    transcriber = let_transcribe(model, says(" Hello you."))
    with opened(tab, model):
        assert tab.run(VIEWS) == "Transcribe|Live"
        tab.wait("!!document.getElementById('recording')")
        tab.bring("choose", ("a.wav", "audio/wav", written(noise(1.0))), into="recording")
        click(tab, "#ask [type=submit]")
        said = "document.querySelector('#output .words')?.innerText === 'Hello you.'"
        tab.wait(f"{said} && !!document.querySelector('#output .help')")
        click(tab, "#ask [type=button]")
        tab.wait("document.querySelector('#ask [type=button]').innerText.startsWith('Stop')")
        tab.run("new Promise(done => setTimeout(done, 1300))")  # the browser's microphone beeps each second
        click(tab, "#ask [type=button]")
        tab.wait("document.getElementById('recording').files[0].name === 'recording'")
        tab.wait(f"{said} && !!document.querySelector('#output .help')")
        assert len(transcriber.asked) == 2 and transcriber.open == 0
        click(tab, "#ask [type=button]")
        tab.wait("document.querySelector('#ask [type=button]').innerText.startsWith('Stop')")
        click(tab, "#go-live")  # which ends the recording, that nobody waits for
        tab.wait("document.querySelector('#ask [type=button]').textContent === 'Record'")
        assert len(transcriber.asked) == 2


def test_an_error_is_shown_in_place_of_results(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model, "compare"):
        fill(tab, "texts", "a" * 5000)
        click(tab, "#ask [type=submit]")
        assert "128 tokens" in tab.wait("document.querySelector('#output .error')?.textContent")
        tab.complaints.clear()  # the browser notes the status 400


def test_the_picker_chooses_among_several_models(tab: Tab, model: FakeFrontend) -> None:
    """The names of one model stand for several."""
    with opened(tab, model):
        options = "[...document.getElementById('model').options].map(one => one.value)"
        assert tab.run(options) == ["org/tiny", "tiny"]
        tab.run("document.getElementById('model').value = 'tiny'")
        tab.run("document.getElementById('model').dispatchEvent(new Event('change'))")
        tab.wait("document.querySelector('#first b').textContent === 'tiny'")
        click(tab, "#open-settings")
        click(tab, "#show-code")
        assert '"model": "tiny"' in tab.wait("document.getElementById('code-text').textContent")
        tab.run("document.body.dataset.ready = ''; location.reload()")
        tab.wait(f"{READY} && document.getElementById('model').value === 'tiny'")


def test_live_data_are_read_only_while_they_are_seen(tab: Tab, model: FakeFrontend) -> None:
    admission = model.admissions.admit(ANYONE, 2)
    admission.take_id("cmpl-of-somebody")
    admission.since = time.monotonic() - 7
    with opened(tab, model):
        assert WATCH.watchers == 0
        click(tab, "#go-live")
        tab.wait("document.querySelectorAll('#charts polyline').length >= 4")
        texts = tab.run("[...document.querySelectorAll('#charts figure')].map(one => one.textContent)")
        assert len(texts) == 9 and texts[0].startswith("Outputtokens/s") and "\u221260 s" in texts[0]
        cells = "[...document.querySelectorAll('#requests td')].map(one => one.textContent)"
        name, age, answers, state = tab.run(cells)
        assert (name, answers, state) == ("cmpl-of-somebody", "2", "waits")
        assert float(age.removesuffix(" s")) >= 7
        admission.release()
        tab.wait("document.getElementById('requests').textContent === 'None.'")
        assert WATCH.watchers == 1
        click(tab, "#go-chat")
        tab.run("new Promise(done => setTimeout(done, 50))")
        for _ in range(1000):
            if not WATCH.watchers:
                break
            tab.run("new Promise(done => setTimeout(done, 20))")
        assert WATCH.watchers == 0


def test_loading_is_shown_and_ends(tab: Tab, model: FakeFrontend) -> None:
    model.status = loading("weights", 0.5)
    model.unready = Unavailable("The model is loading.", retry_after=1)
    with served(model) as url:
        tab.open(url)
        tab.wait("document.getElementById('state').textContent.includes('weights, 50 %')")
        model.status, model.unready = SERVER_READY, None
        tab.wait(READY)
        assert tab.run("document.getElementById('state').hidden")
        tab.complaints.clear()  # the browser notes the status 503


OPEN = "document.getElementById('key-dialog').open"


SLOWER = """
  const real = fetch;
  let late = 0;
  window.fetch = async (...all) => {
    const found = await real(...all);
    await new Promise((done) => setTimeout(done, (late += 500)));
    return found;
  };
"""
"""Each answer comes later than the one before."""


def enter(tab: Tab, key: str) -> None:
    tab.wait(OPEN)
    tab.run(f"document.getElementById('key').value = '{key}'")
    click(tab, "#key-form [type=submit]")


def load_again(tab: Tab) -> None:
    tab.run("document.body.dataset.old = 'yes'; location.reload()")
    tab.wait(f"{READY} && !document.body.dataset.old && !{OPEN}")


def test_a_key_is_asked_for_until_it_is_right_and_then_kept(tab: Tab, model: FakeFrontend) -> None:
    reason = "document.getElementById('key-reason').textContent"
    with served(model, access=AccessOptions(api_key=["secret"])) as url:
        tab.open(url)
        assert tab.wait(f"{OPEN} && {reason}").startswith("Whoever runs the server has it")
        enter(tab, "wrong")
        tab.wait(f"{reason}.startsWith('The server does not know this key')")
        enter(tab, "secret")
        tab.wait(READY)
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")
        assert tab.run("JSON.stringify(localStorage).includes('secret')") is False
        load_again(tab)
        tab.complaints.clear()  # the browser notes the status 401


def test_a_key_may_have_any_letters(tab: Tab, model: FakeFrontend) -> None:
    with served(model, access=AccessOptions(api_key=["schlüssel-ключ"])) as url:
        tab.open(url)
        enter(tab, "ключ")
        tab.wait("document.getElementById('key-reason').textContent.includes('does not know')")
        enter(tab, "schlüssel-ключ")
        tab.wait(READY)
        tab.complaints.clear()  # the browser notes the status 401


def test_nothing_is_sent_before_the_models_are_known(tab: Tab, model: FakeFrontend) -> None:
    told = "document.getElementById('told').textContent"
    with served(model, access=AccessOptions(api_key=["secret"])) as url:
        tab.open(url)
        click(tab, "#no-key")
        say(tab, "hi")
        tab.wait(f"{told} === 'The server has not told its models yet.'")
        tab.run("document.getElementById('told').textContent = ''")
        tab.bring("drop", ("a.txt", "text/plain", b"words"))
        tab.wait(f"{told} === 'The server has not told its models yet.'")
        click(tab, "#state button")
        enter(tab, "secret")
        tab.wait(READY)
        tab.run("document.getElementById('input').focus()")
        tab.press("Enter")
        hear(tab, "hi|Hello, world.")
        tab.complaints.clear()  # the browser notes the status 401


def test_a_key_is_asked_for_once(tab: Tab, model: FakeFrontend) -> None:
    """Requests that are on their way together ask once; other tabs and what runs by itself do not ask."""
    with served(model, access=AccessOptions(api_key=["secret"])) as url:
        tab.open(f"{url}/#live")
        click(tab, "#no-key")
        tab.wait("document.getElementById('live-state').textContent.includes('only with a key')")
        tab.wait("!document.getElementById('state').hidden")
        tab.run("new Promise(done => setTimeout(done, 2500))")
        assert not tab.run(OPEN)
        click(tab, "#state button")
        tab.wait(OPEN)
        tab.run("document.getElementById('key-stays').checked = true")
        enter(tab, "secret")
        tab.wait(READY)
        tab.run("sessionStorage.clear()")  # as in another tab
        load_again(tab)
        tab.run("localStorage.removeItem('facet-key')")
        tab.run(f"{{{SLOWER}}}")
        both = "Promise.all([1, 2].map(() => m.get('v1/models')))"
        module(tab, "api.js", f"{{ {both}.then((all) => {{ window.both = all.length; }}); return 0; }}")
        enter(tab, "secret")
        tab.wait(f"window.both === 2 && !{OPEN}")
        tab.complaints.clear()  # the browser notes the status 401


def places(tab: Tab, selector: str) -> dict[str, float]:
    return tab.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")


def test_nothing_is_scrolled_away_and_the_field_stands_at_the_bottom(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model, width=1280, height=860):
        tab.run("document.getElementById('input').focus()")
        assert places(tab, "header")["top"] == 0
        assert 860 - places(tab, "#say")["bottom"] < 50
        for _ in range(4):
            say(tab, "hi\n" * 20)
            tab.wait(f"{IDLE} && document.getElementById('input').value === ''")
        assert places(tab, "header")["top"] == 0
        assert places(tab, "#messages > li:last-child")["bottom"] <= places(tab, "#say")["top"]


@pytest.mark.parametrize("place", ["chat", "decide", "compare", "live"])
def test_a_phone_needs_no_scrolling_sideways(tab: Tab, model: FakeFrontend, place: str) -> None:
    with opened(tab, model, place, width=360, height=640):
        assert not tab.run("document.getElementById('side').checkVisibility()")
        if place == "chat":
            say(tab, "hi " * 30)
            tab.wait(f"{IDLE} && document.querySelectorAll('#messages li').length === 2")
        if place == "decide":
            click(tab, "#ask [type=submit]")
            tab.wait("document.querySelectorAll('.bars').length === 3")
        if place == "compare":
            click(tab, "#ask [type=submit]")
            tab.wait("document.querySelectorAll('.map circle').length === 4")
        assert tab.run("document.documentElement.scrollWidth") <= 360
        parts = (
            "document.querySelectorAll('main > section:not([hidden]), main > section:not([hidden]) > div')"
        )
        assert tab.run(f"[...{parts}].every(one => one.scrollWidth <= one.clientWidth + 1)")
        click(tab, "#show-side")
        tab.wait("document.getElementById('side').checkVisibility()")
        tab.press("Escape")
        assert not tab.run("document.getElementById('side').checkVisibility()")
