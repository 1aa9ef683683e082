"""The page when its server goes away, comes back, or breaks an answer off."""

import json

import pytest
from chromium import Tab
from fake_frontend import FakeFrontend
from page_driver import IDLE, LISTED, MESSAGES, READY, click, hear, opened, say

from server.errors import READY as SERVER_READY
from server.errors import loading

STATE = "(place => place.hidden ? '' : place.innerText)(document.getElementById('state'))"
GONE = 'window.real ??= fetch; window.fetch = async () => { throw new TypeError("Failed to fetch"); }'
BREAKS = """
  const real = fetch, block = (delta) => `data: ${JSON.stringify({choices: [{index: 0, delta}]})}\\n\\n`;
  window.sent = [];
  window.fetch = async (url, options) => {
    if (!String(url).includes("chat")) return real(url, options);
    window.sent.push(JSON.parse(options.body));
    if (window.sent.length > 1) return new Response(block({content: "world."}) + "data: [DONE]\\n\\n");
    return new Response(new ReadableStream({ async pull(stream) {
      if (window.broken) setTimeout(() => stream.error(new TypeError("network error")), 100);
      else stream.enqueue(new TextEncoder().encode(block({content: "Hello, "})));
      window.broken = true;
    }}));
  };
"""


def test_a_server_that_is_gone_and_back_is_told(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        tab.run(GONE)
        say(tab, "hi")
        assert "does not answer" in tab.wait(f"{IDLE} && document.querySelector('.error')?.innerText")
        assert "keeps what you wrote" in tab.wait(STATE)
        assert "Failed to fetch" not in tab.text()
        model.status = loading("weights", 0.5)
        tab.run("window.fetch = window.real; 0")
        tab.wait(f"{STATE}.includes('weights, 50 %')")
        model.status = SERVER_READY
        tab.wait(f"{STATE} === 'The server is back.'")
        click(tab, ".assistant .chip")  # try again
        tab.wait(f"{IDLE} && {MESSAGES}.endsWith('Hello, world.')")
        tab.complaints.clear()  # the browser notes the status 503


@pytest.mark.parametrize(("status", "gone"), [(0, True), (502, True), (404, False)])
def test_a_server_that_has_gone_unnoticed_is_told_of_when_somebody_looks(
    tab: Tab, model: FakeFrontend, status: int, gone: bool
) -> None:
    """A proxy may answer in its place, or hide the path by which the page looks."""
    with opened(tab, model):
        tab.run(GONE)
        if status:
            answer = f'(window.seen = true, new Response("<html>", {{status: {status}}}))'
            tab.run(f"window.fetch = async () => {answer}; 0")
        tab.run("document.dispatchEvent(new Event('visibilitychange'))")
        if gone:
            tab.wait(f"{STATE}.includes('does not answer')")
        else:
            tab.wait("window.seen")
            tab.run("new Promise(done => setTimeout(done, 100))")
            assert tab.run(STATE) == ""


def test_an_answer_that_broke_off_is_continued(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        tab.run(f"{{{BREAKS}}}")
        say(tab, "hi")
        hear(tab, "hi|Hello, ")
        assert "broke off" in tab.run("document.querySelector('.assistant .error').innerText")
        click(tab, ".assistant .chip")
        hear(tab, "hi|Hello, world.")
        asked = tab.run("window.sent.at(-1)")
        assert asked["messages"][-1] == {"role": "assistant", "content": "Hello, "}
        assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
        assert not tab.run("document.querySelectorAll('.assistant .error, .assistant .chip').length")


@pytest.mark.parametrize("way", ["stopped", "the page was closed"])
def test_an_answer_that_was_not_finished_can_go_on(tab: Tab, model: FakeFrontend, way: str) -> None:
    with opened(tab, model):
        model.delay = 3600.0
        say(tab, "hi")
        tab.wait(f"{MESSAGES} === 'hi|' && !{IDLE}")
        if way == "stopped":
            tab.press("Escape")
        else:
            tab.wait(f"{LISTED} === 'hi'")  # the browser has kept it
            tab.run("document.body.dataset.old = 'yes'; location.reload()")
            tab.wait(f"{READY} && !document.body.dataset.old")
        told = tab.wait(f"{IDLE} && document.querySelector('.assistant .row')?.textContent")
        assert told == "The answer was stopped before its end.Try again"
        tab.complaints.clear()


def test_words_of_the_engine_are_shown_as_they_are(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        error = json.dumps({"error": {"message": "The engine has failed."}})
        tab.run(
            f"{{ const real = fetch; window.fetch = async (url, ...more) => String(url).includes('chat')"
            f" ? new Response('data: ' + {json.dumps(error)} + '\\n\\n') : real(url, ...more); }}"
        )
        say(tab, "hi")
        assert tab.wait("document.querySelector('.error')?.innerText") == "The engine has failed."
