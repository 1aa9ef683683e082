"""Conversations that the browser keeps outlive the page, are found, renamed, exported, imported, deleted."""

import asyncio
import json

from chromium import Tab
from fake_frontend import FakeFrontend
from page_driver import LISTED, MESSAGES, READY, click, fill, hear, module, opened, say

SAVES = """
  window.saved = [];
  URL.createObjectURL = (blob) => (blob.text().then((text) => window.saved.push(text)), "about:blank");
  const click = HTMLAnchorElement.prototype.click;
  HTMLAnchorElement.prototype.click = function () {
    if (this.download) window.named = this.download; else click.call(this);
  };
"""


def again(tab: Tab) -> None:
    """Loads the page anew."""
    tab.run("document.body.dataset.old = 'yes'; location.reload()")
    tab.wait(f"{READY} && !document.body.dataset.old")


def choose(tab: Tab, text: str, nth: int = 0) -> None:
    """Chooses from the menu of the nth conversation."""
    click(tab, "#conversations [aria-haspopup]", nth)
    tab.run(
        "[...document.querySelectorAll('#menu button')]"
        f".find(one => one.textContent === {json.dumps(text)}).click()"
    )


def test_what_a_first_time_user_does(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        asked = tab.run("document.querySelectorAll('.examples span')[1].textContent")
        model.reply = "def"
        click(tab, ".examples button", 1)
        tab.wait(f"{MESSAGES} === {json.dumps(asked + '|def')}")
        tab.wait(f"{LISTED} === {json.dumps(asked[:80])}")
        again(tab)
        hear(tab, asked + "|def")
        assert tab.run(LISTED) == asked[:80]
        say(tab, "and?")
        hear(tab, asked + "|def|and?|def")
        click(tab, "#go-chat")
        tab.wait("!document.getElementById('first').hidden")
        tab.run("history.back()")
        hear(tab, asked + "|def|and?|def")


def test_no_character_of_a_title_is_cut_in_two(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        say(tab, 79 * "a" + "🙂🙂")
        tab.wait(f"{LISTED} === {json.dumps(79 * 'a' + '🙂')}")


def test_what_came_of_an_answer_outlives_the_page_and_no_error_of_leaving_it(
    tab: Tab, model: FakeFrontend
) -> None:
    model.gate = asyncio.Event()
    with opened(tab, model):
        say(tab, "hi")
        tab.wait(f"{MESSAGES} === 'hi|Hel' && {LISTED} === 'hi'")
        again(tab)
        hear(tab, "hi|Hel")
        assert "does not answer" not in tab.run("document.getElementById('messages').textContent")


def test_an_answer_goes_on_while_another_conversation_is_shown(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        model.delay = 0.5
        say(tab, "slow")
        tab.wait(f"{LISTED} === 'slow'")
        click(tab, "#go-chat")
        model.delay = 0.0
        say(tab, "fast")
        hear(tab, "fast|Hello, world.")
        tab.wait(f"{LISTED}.split('|').sort().join() === 'fast,slow'")
        tab.run("[...document.querySelectorAll('#conversations a')].find(one => one.text === 'slow').click()")
        hear(tab, "slow|Hello, world.")
        again(tab)
        hear(tab, "slow|Hello, world.")


def test_what_another_tab_adds_to_a_conversation_is_shown_and_stays(tab: Tab, model: FakeFrontend) -> None:
    more = "{role: 'user', content: 'elsewhere', after: 1, shown: true}"
    added = f"{{...one, messages: [...one.messages, {more}]}}"
    with opened(tab, model):
        say(tab, "one")
        hear(tab, "one|Hello, world.")
        tab.wait(f"{LISTED} === 'one'")
        told = "new BroadcastChannel('facet-conversations').postMessage(one.id)"
        module(tab, "chat/store.js", f"m.loadAll().then(([one]) => m.put({added}).then(() => {told}))")
        hear(tab, "one|Hello, world.|elsewhere")
        say(tab, "two")
        hear(tab, "one|Hello, world.|elsewhere|two|Hello, world.")


def test_the_list_holds_still_while_an_answer_is_kept_again_and_again(tab: Tab, model: FakeFrontend) -> None:
    again = (
        "m.loadAll().then(([one]) => m.put({...one, messages: [{...one.messages[0], content: 'longer'}]}))"
    )
    told = "new BroadcastChannel('facet-conversations').postMessage('')"
    with opened(tab, model):
        say(tab, "one")
        hear(tab, "one|Hello, world.")
        tab.wait(f"{LISTED} === 'one'")
        tab.run("document.querySelector('#conversations a').focus()")
        module(tab, "chat/store.js", f"{again}.then(() => {told})")
        tab.run("new Promise(done => setTimeout(done, 100))")
        assert tab.run("document.activeElement.hash").startswith("#chat/")
        choose(tab, "Rename")
        tab.run("document.activeElement.value = 'tw'")
        module(tab, "chat/store.js", f"{again}.then(() => {told})")
        tab.run("new Promise(done => setTimeout(done, 100))")
        tab.run("document.activeElement.value += 'o'")
        tab.press("Enter")
        tab.wait(f"{LISTED} === 'two'")


def test_they_are_found_renamed_exported_imported_and_deleted(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        for text in ("apples", "pears"):
            click(tab, "#go-chat")
            model.reply = f"About {text}."
            say(tab, text)
            hear(tab, f"{text}|About {text}.")
        tab.wait(f"{LISTED} === 'pears|apples'")
        fill(tab, "search", "about APPLES")
        assert tab.run(LISTED) == "apples"
        choose(tab, "Rename")
        tab.run("document.activeElement.value = 'Fruit'")
        tab.press("Enter")
        fill(tab, "search", "")
        tab.wait(f"{LISTED} === 'pears|Fruit'")

        tab.run(f"{{{SAVES}}}")
        choose(tab, "Export as Markdown", 1)
        assert tab.wait("window.saved[0]") == "# Fruit\n\n**You**\n\napples\n\n**Model**\n\nAbout apples.\n"
        assert tab.run("window.named") == "Fruit.md"
        choose(tab, "Export as JSON", 1)
        exported = tab.wait("window.saved[1]")

        choose(tab, "Delete", 0)  # the one that is open
        tab.wait(f"{LISTED} === 'Fruit' && {MESSAGES} === ''")
        click(tab, "#toast button")  # undo
        tab.wait(f"{LISTED} === 'pears|Fruit'")
        choose(tab, "Delete", 1)
        tab.wait(f"{LISTED} === 'pears'")

        click(tab, "#open-settings")
        _import(tab, exported)
        tab.wait(f"{LISTED} === 'pears|Fruit'")
        click(tab, "#conversations a", 1)
        hear(tab, "apples|About apples.")
        _import(tab, "[1]")
        assert "cannot be imported" in tab.wait(
            "(text => /no conversations/.test(text) && text)(document.getElementById('toast').innerText)"
        )


def test_a_search_shows_where_the_words_are(tab: Tab, model: FakeFrontend) -> None:
    word = "one.startContainer.data.slice(one.startOffset, one.endOffset)"
    marks = f"[...CSS.highlights.get('found') ?? []].map(one => {word})"
    with opened(tab, model):
        model.reply = "The **Red** fox" + "".join(f" runs {n}" for n in range(900))
        say(tab, "tell")
        tab.wait(f"{MESSAGES}.startsWith('tell|The Red fox')")
        model.reply = "Nothing."
        click(tab, "[aria-label=Regenerate]")
        hear(tab, "tell|Nothing.")
        fill(tab, "search", "red fox")
        assert tab.wait("document.querySelector('.where')?.textContent").startswith("The **Red** fox runs 0")
        assert tab.run("document.querySelector('.where mark').textContent") == "Red"
        click(tab, "#conversations a")  # of the conversation that is open, whose other branch has the words
        tab.wait(f"{MESSAGES}.startsWith('tell|The Red fox')")
        assert tab.run(marks) == ["Red", "fox"]
        assert tab.run("document.getElementById('scroll').scrollTop") < 300
        fill(tab, "search", "")
        assert tab.run(marks) == []


def _import(tab: Tab, text: str) -> None:
    tab.run(
        "(field => { const list = new DataTransfer();"
        f"list.items.add(new File([{json.dumps(text)}], 'a.json'));"
        "field.files = list.files; field.dispatchEvent(new Event('change')); })"
        "(document.getElementById('import-file'))"
    )


def test_an_imported_file_makes_no_requests_to_others(tab: Tab, model: FakeFrontend) -> None:
    pictures = [
        {"name": "a", "url": "https://other.example/a.png"},
        {"name": "b", "url": "data:image/png;base64,AA=="},
    ]
    message = {"role": "user", "content": "<img src=x onerror=alert(1)>", "after": -1, "shown": True}
    with opened(tab, model):
        click(tab, "#open-settings")
        _import(tab, json.dumps([{"title": "<b>bold</b>", "messages": [{**message, "pictures": pictures}]}]))
        tab.wait(f"{LISTED} === '<b>bold</b>'")
        click(tab, "#conversations a")
        tab.wait(f"{MESSAGES} === '<img src=x onerror=alert(1)>'")
        assert tab.run("[...document.querySelectorAll('#messages img')].map(one => one.alt)") == ["b"]
