"""What tests do with the page: open it over a scripted frontend, write, click, read what is shown."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chromium import Tab
from fake_frontend import FakeFrontend
from served_app import served

READY = "document.body?.dataset.ready"
IDLE = "document.getElementById('stop').hidden"
MESSAGES = "[...document.querySelectorAll('#messages .text')].map(one => one.textContent).join('|')"
LISTED = "[...document.querySelectorAll('#conversations a')].map(one => one.firstChild.data).join('|')"


@contextmanager
def opened(tab: Tab, frontend: FakeFrontend, place: str = "", **options: int) -> Iterator[str]:
    """The page, open at one of its views and ready; yields the address of its server."""
    with served(frontend) as url:
        tab.open(f"{url}/#{place}", **options)
        tab.wait(READY)
        yield url


def say(tab: Tab, text: str) -> None:
    """Writes a message, and sends it by the key Enter."""
    tab.run(f"document.getElementById('input').value = {json.dumps(text)}")
    tab.run("document.getElementById('input').focus()")
    tab.press("Enter")


def hear(tab: Tab, messages: str) -> None:
    """Waits until the conversation is this one, and complete."""
    tab.wait(f"{IDLE} && {MESSAGES} === {json.dumps(messages)}")


def click(tab: Tab, selector: str, nth: int = 0) -> None:
    """Clicks on the nth element of a selector that is seen, once there is one."""
    seen = f"[...document.querySelectorAll({json.dumps(selector)})].filter(one => one.checkVisibility())"
    tab.wait(f"(one => one && (one.click(), true))({seen}[{nth}])")


def fill(tab: Tab, id: str, value: str) -> None:
    """Fills a field in, as somebody would who types."""
    tab.wait(f"document.getElementById({json.dumps(id)}) !== null")
    tab.run(
        f"(field => {{ field.value = {json.dumps(value)}; "
        "field.dispatchEvent(new Event('input', {bubbles: true})) })"
        f"(document.getElementById({json.dumps(id)}))"
    )


def module(tab: Tab, path: str, expression: str) -> Any:
    """The value of an expression over `m`, a module of the page."""
    address = "document.querySelector('script[type=module]').src.replace('app.js', " + json.dumps(path) + ")"
    return tab.run(f"import({address}).then((m) => {expression})")


def kept_messages(tab: Tab) -> list[dict[str, Any]]:
    """The messages of the only conversation that the browser keeps, as far as they are kept."""
    return module(tab, "chat/store.js", "m.loadAll().then((all) => all[0]?.messages ?? [])")
