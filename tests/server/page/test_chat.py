"""The page's chat in a real browser: sending, branches, tokens, tools, settings."""

import asyncio
import json
from typing import Literal

from chromium import Tab
from fake_frontend import FakeFrontend
from msgspec.structs import replace
from page_driver import IDLE, MESSAGES, click, fill, hear, opened, say


class Moment(asyncio.Event):
    """A gate that opens by itself, so that the parts of an answer come apart, and it has a rate."""

    async def wait(self) -> Literal[True]:
        await asyncio.sleep(0.02)
        return True


def test_messages_are_sent_answered_anew_and_shown_as_code(tab: Tab, model: FakeFrontend) -> None:
    model.gate = Moment()
    with opened(tab, model) as url:
        assert tab.run("document.activeElement.id") == "input"
        assert "writes text · turns texts into vectors" in tab.run(
            "document.querySelector('#first .help').textContent.replaceAll('\\u00a0', ' ')"
        )
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")
        assert "tokens/s" in tab.run("document.querySelector('.assistant .pace').textContent")
        click(tab, "[aria-label=Regenerate]")
        hear(tab, "hi|Hello, world.")
        click(tab, "#open-settings")
        fill(tab, "option-max_tokens", "5")
        click(tab, "#go-chat")
        tab.wait(f"{MESSAGES} === ''")
        say(tab, "again")
        hear(tab, "again|Hello")
        assert "ended at its limit" in tab.run("document.querySelector('.assistant').textContent")
        click(tab, "#show-code")
        shown = tab.wait("document.getElementById('code-text').textContent")
        assert f"curl '{url}/v1/chat/completions'" in shown and '"max_tokens": 5' in shown


def test_an_answer_is_stopped_and_what_has_come_of_it_stays(tab: Tab, model: FakeFrontend) -> None:
    model.gate = asyncio.Event()
    with opened(tab, model):
        say(tab, "hi")
        tab.wait(f"{MESSAGES} === 'hi|Hel' && !{IDLE}")
        assert "3 tokens" in tab.wait("document.getElementById('pace').textContent")
        tab.press("Escape")
        hear(tab, "hi|Hel")
        assert tab.run("document.querySelectorAll('.error').length") == 0


def test_edited_and_repeated_turns_are_branches(tab: Tab, model: FakeFrontend) -> None:
    edit, earlier = '[aria-label="Edit this message as a new branch"]', '[aria-label="Earlier version"]'
    with opened(tab, model):
        say(tab, "one")
        hear(tab, "one|Hello, world.")
        say(tab, "two")
        hear(tab, "one|Hello, world.|two|Hello, world.")
        model.reply = "Another."
        click(tab, "[aria-label=Regenerate]", 1)
        hear(tab, "one|Hello, world.|two|Another.")
        click(tab, edit)
        tab.wait("document.activeElement.value === 'one'")
        tab.run("document.activeElement.value = 'three'")
        tab.press("Enter")
        hear(tab, "three|Another.")
        asked, _, _ = model.asked[-1]
        assert "one" not in model.tokenizer.decode(asked, False)
        click(tab, earlier)  # of the first message: its answers come back, the later one shown
        hear(tab, "one|Hello, world.|two|Another.")
        click(tab, earlier, 1)
        hear(tab, "one|Hello, world.|two|Hello, world.")
        places = "[...document.querySelectorAll('.versions:not([hidden]) span')].map(one => one.innerText)"
        assert tab.run(places) == ["1 of 2", "1 of 2"]
        assert tab.run("document.activeElement.getAttribute('aria-label')") == "Later version"
        tab.run("document.getElementById('input').focus()")
        tab.press("ArrowUp")  # edits the last message
        tab.wait("document.activeElement.value === 'two'")
        tab.press("Escape")
        hear(tab, "one|Hello, world.|two|Hello, world.")
        say(tab, "go on")  # at the end of the branch that is shown
        tab.wait(f"{IDLE} && {MESSAGES}.endsWith('two|Hello, world.|go on|Another.')")


def test_the_tick_of_copying_goes_away(tab: Tab, model: FakeFrontend) -> None:
    icon = "document.querySelector('.assistant [aria-label=Copy] use').getAttribute('href')"
    with opened(tab, model):
        tab.run("Object.defineProperty(navigator, 'clipboard', {value: {writeText: async () => {}}}); 0")
        tab.run("window.later = window.setTimeout; window.setTimeout = (act, ms) => later(act, ms / 10)")
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")
        for _ in range(2):
            click(tab, ".assistant [aria-label=Copy]")
            tab.wait(f"{icon} === '#i-done'")
        tab.wait(f"{icon} === '#i-copy'")


def test_keys_of_an_input_method_are_left_to_it(tab: Tab, model: FakeFrontend) -> None:
    """While somebody chooses among its words, Enter and Escape send, name, open, cancel and stop nothing."""

    def press_composing(key: str, **more: int) -> None:
        event = json.dumps({"key": key, "bubbles": True, "isComposing": not more, **more})
        tab.run(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {event}))")

    with opened(tab, model):
        say(tab, "one")
        hear(tab, "one|Hello, world.")
        model.gate = asyncio.Event()
        say(tab, "two")
        tab.wait(f"{MESSAGES}.endsWith('two|Hel')")
        press_composing("Escape")
        fill(tab, "search", "one")
        tab.run("document.getElementById('search').focus()")
        press_composing("Escape")
        tab.press("Escape")  # clears the search, and stops no answer
        tab.wait("!document.getElementById('search').value")
        assert not tab.run(IDLE)
        tab.run("document.getElementById('input').focus()")
        tab.press("Escape")
        tab.wait(IDLE)
        click(tab, '[aria-label="Edit this message as a new branch"]')
        tab.wait("document.activeElement.value === 'one'")
        for key in ("Enter", "Escape"):
            press_composing(key)
            press_composing(key, keyCode=229)
        tab.run("document.activeElement.value = 'three'")
        tab.press("Escape")
        hear(tab, "one|Hello, world.|two|Hel")
        click(tab, "#conversations [aria-haspopup]")
        click(tab, "#menu button")
        press_composing("Enter")
        press_composing("Escape")
        assert tab.run("document.activeElement.getAttribute('aria-label')") == "New title"


def test_answers_are_edited_and_single_messages_deleted(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        for text in ("one", "two"):
            say(tab, text)
            tab.wait(f"{IDLE} && {MESSAGES}.endsWith('{text}|Hello, world.')")
        click(tab, '[aria-label="Edit this answer as a new branch"]', 1)
        tab.wait("document.activeElement.value === 'Hello, world.'")
        tab.run("document.activeElement.value = 'Once upon'")
        click(tab, ".edit [type=submit]")
        hear(tab, "one|Hello, world.|two|Once upon")
        assert len(model.asked) == 2
        model.reply = " a time."
        click(tab, ".assistant .chip")  # the model continues what was written for it
        hear(tab, "one|Hello, world.|two|Once upon a time.")
        click(tab, '[aria-label="Delete this answer"]')
        hear(tab, "one|two|Once upon a time.")
        click(tab, "#toast button")  # undo
        hear(tab, "one|Hello, world.|two|Once upon a time.")
        click(tab, '[aria-label="Delete this message"]')
        hear(tab, "Hello, world.|two|Once upon a time.")
        click(tab, '[aria-label="Delete this answer"]', 1)
        hear(tab, "Hello, world.|two|Hello, world.")  # its other version is shown


def test_a_deletion_is_not_undone_over_a_later_message(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        say(tab, "one")
        hear(tab, "one|Hello, world.")
        click(tab, '[aria-label="Delete this answer"]')
        tab.wait("!document.getElementById('toast').hidden")
        say(tab, "two")
        hear(tab, "one|two|Hello, world.")
        assert tab.run("document.getElementById('toast').hidden")


def test_of_several_choices_the_first_is_shown(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        click(tab, "#open-settings")
        fill(tab, "more", '{"n": 2}')
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")


def test_hebrew_is_written_from_right_to_left(tab: Tab, model: FakeFrontend) -> None:
    """The mark behind the last word stands to the left of the first letter."""
    place = (
        "((node, at) => { const range = document.createRange(); range.setStart(node, at); "
        "range.setEnd(node, at + 1); return range.getBoundingClientRect().left; })"
    )
    model.reply = "שלום!"
    with opened(tab, model):
        say(tab, "שלום!")
        hear(tab, "שלום!|שלום!")
        for text in (".user .text", ".assistant .text p"):
            node = f"document.querySelector('{text}').firstChild"
            assert tab.run(f"{place}({node}, 4) < {place}({node}, 0)")


def test_an_answer_that_repeats_itself_is_stopped(tab: Tab, model: FakeFrontend) -> None:
    model.reply = "I begin. " + "And so on and on. " * 200
    with opened(tab, model):
        say(tab, "hi")
        told = tab.wait(f"{IDLE} && document.querySelector('.assistant .row')?.innerText")
        assert told.startswith("The answer repeated itself and was stopped.")
        assert len(tab.run(MESSAGES)) < 2000
        model.reply = "And so on. " * 200
        click(tab, ".assistant .chip")
        tab.wait(f"{IDLE} && {MESSAGES}.length > 3400 && !document.querySelector('.assistant .row')")


def test_tokens_have_colours_and_alternatives(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        click(tab, "#open-settings")
        click(tab, "#colours")
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")
        assert tab.run("document.querySelectorAll('.token.p3').length") == len("Hello, world.")
        tab.run("document.querySelector('.token').focus()")
        assert "60.7 %" in tab.wait(
            "!document.getElementById('tip').hidden && document.getElementById('tip').textContent"
        )
        tab.press("ArrowRight")
        tab.wait("document.activeElement.textContent === 'e'")
        say(tab, "again")
        hear(tab, "hi|Hello, world.|again|Hello, world.")
        stops = "one => one.querySelectorAll('[tabindex=\"0\"]').length"
        # The Tab key leads to each answer.
        assert tab.run(f"[...document.querySelectorAll('.tokens')].map({stops})") == [1, 1]


def test_an_answer_goes_on_with_colours_and_without(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        click(tab, "#open-settings")
        fill(tab, "option-max_tokens", "4")
        said = "hi|"
        say(tab, "hi")
        for more in ("Hell", "Hell", "Hell"):
            said += more
            hear(tab, said)
            click(tab, "#colours")
            click(tab, ".assistant .chip")
        hear(tab, said + "Hell")
        assert tab.run("document.querySelectorAll('.token').length") == 8


def test_presets_are_system_prompts_and_own_ones_are_kept(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        click(tab, "#open-settings")
        fill(tab, "system", "Be a pirate.")
        fill(tab, "preset-name", "Pirate")
        click(tab, "#save-preset button")
        assert tab.run("document.getElementById('role').textContent") == "Pirate"
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")
        assert "<system>Be a pirate." in model.tokenizer.decode(model.asked[-1][0], False)
        tab.run("document.getElementById('preset').value = ''")
        tab.run("document.getElementById('preset').dispatchEvent(new Event('change'))")
        say(tab, "ho")
        tab.wait(f"{IDLE} && {MESSAGES}.endsWith('|ho|Hello, world.')")
        assert "<system>" not in model.tokenizer.decode(model.asked[-1][0], False)
        tab.press("Escape")
        names = tab.run("[...document.getElementById('preset').options].map(one => one.text)")
        assert names[:2] == ["None", "Brief"] and names[-1] == "Pirate"


def test_what_is_wrong_is_said_where_it_is(tab: Tab, model: FakeFrontend) -> None:
    told = "document.getElementById('told').textContent"
    with opened(tab, model):
        click(tab, "#open-settings")
        fill(tab, "more", "{")
        say(tab, "hi")
        assert "Other fields: this is no JSON" in tab.wait(told)
        assert tab.run("document.getElementById('input').value") == "hi"  # nothing typed is lost
        fill(tab, "more", '[{"top_k": 5}]')
        say(tab, "hi")
        assert "Other fields: this is no JSON object" in tab.wait(f"{told}.includes('object') && {told}")
        click(tab, "#reset")
        fill(tab, "option-temperature", "-1")
        say(tab, "hi")
        assert "temperature" in tab.wait("document.querySelector('#messages .error')?.textContent")
        tab.complaints.clear()  # the browser notes the status 400


def test_an_answer_is_not_tried_again_while_a_setting_is_wrong(tab: Tab, model: FakeFrontend) -> None:
    """Neither the answer that failed is taken away then, nor another one beside it."""
    refuses = "async () => new Response('{}', {status: 400})"
    with opened(tab, model):
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")
        tab.run(f"window.real = fetch; window.fetch = {refuses}; 0")
        click(tab, "[aria-label=Regenerate]")
        tab.wait(f"{IDLE} && document.querySelectorAll('.error').length === 1")
        tab.run("window.fetch = window.real; 0")
        fill(tab, "more", "{")
        for _ in range(2):
            click(tab, ".assistant .chip")
        tab.wait("document.getElementById('told').textContent.includes('no JSON')")
        fill(tab, "more", "")
        model.reply = "Again."
        click(tab, ".assistant .chip")
        hear(tab, "hi|Again.")
        click(tab, '[aria-label="Earlier version"]')
        hear(tab, "hi|Hello, world.")


def test_settings_show_the_values_in_force(tab: Tab, model: FakeFrontend) -> None:
    model.facts = replace(model.facts, defaults={"temperature": 0.2, "top_k": 40})
    with opened(tab, model):
        click(tab, "#open-settings")
        tab.wait("document.getElementById('option-temperature').placeholder === '0.2'")
        fields = "[...document.querySelectorAll('#options input[id^=option-]')]"
        shown = tab.run(f"Object.fromEntries({fields}.map((field) => [field.name, field.placeholder]))")
        assert (shown["top_k"], shown["top_p"], shown["repetition_penalty"]) == ("40", "1", "1")
        assert (shown["max_tokens"], shown["seed"], shown["stop"]) == ("up to 4,096", "random", "none")
        assert "default" not in tab.run("document.getElementById('options').innerHTML").lower().split()


def test_the_context_in_use_is_shown(tab: Tab, model: FakeFrontend) -> None:
    shown = "document.querySelector('#context:not([hidden]) span')?.innerText"
    with opened(tab, model):
        assert tab.run(shown) is None
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")
        few = tab.run("document.querySelector('#context meter').value")
        assert tab.run(shown) == f"{few} of 4,096 tokens"
        say(tab, "a" * 3900)
        tab.wait(f"{IDLE} && {shown}.endsWith(': nearly full')")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
STREAM = """
  const event = (delta) => JSON.stringify({choices: [{index: 0, delta}], usage: {completion_tokens: 2}});
  const block = (data) => `data: ${data}\\n\\n`;
  const stream = (...all) => new Response([...all.map(event), "[DONE]"].map(block).join(""));
  const call = (given, more) => ({tool_calls: [{index: 0, function: {arguments: given, ...more}, id: "c1"}]});
  const real = fetch;
  window.sent = [];
  window.fetch = async (url, options) => {
    if (!String(url).includes("chat")) return real(url, options);
    const body = JSON.parse(options.body);
    window.sent.push(body);
    return body.messages.at(-1).role === "tool" ? stream({content: "It is 3."})
      : stream({reasoning: "I add."}, call('{"a"', {name: "add"}), call(": 1}"));
  };
"""


def test_reasoning_and_calls_are_folded_and_results_go_back(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        tab.run(f"{{{STREAM}}}")
        click(tab, "#open-settings")
        fill(tab, "tools", json.dumps(TOOLS))
        say(tab, "1 + 2?")
        tab.wait(f"{IDLE} && document.querySelector('.results') !== null")
        titles = "[...document.querySelectorAll('#messages summary')].map(one => one.textContent).join('|')"
        assert tab.run(titles) == "Reasoning|Calls add"
        assert tab.run("[...document.querySelectorAll('#messages details')].some(one => one.open)") is False
        # At once, or a page that is slow might draw the message anew in between.
        answer = "document.querySelector('.results textarea').value = '3'"
        tab.run(f"{answer}; document.querySelector('.results button').click()")
        tab.wait(f"{IDLE} && {MESSAGES}.endsWith('It is 3.')")
        sent = tab.run("window.sent.at(-1)")
        assert sent["tools"] == TOOLS
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        assert sent["messages"][1:] == [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ]
