"""The page by keyboard and screen reader, and by the rules of axe-core, which npm installs into a cache."""

import shutil
import subprocess
from pathlib import Path

import pytest
from chromium import Tab
from fake_frontend import FakeFrontend
from page_driver import IDLE, click, fill, hear, opened, say

CACHE = Path.home() / ".cache" / "facet" / "axe"
VERSION = "4.10.3"
REPLY = "# A\n\n| a |\n|---|\n| $x^2$ |\n\n```python\nif a: # b\n    c('d', 1)\n```\n\n- [x] e"


@pytest.fixture(scope="module")
def axe() -> str:
    script = CACHE / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        npm = shutil.which("npm")
        command = [
            str(npm),
            "install",
            "--silent",
            "--no-save",
            "--prefix",
            str(CACHE),
            f"axe-core@{VERSION}",
        ]
        if npm is None or subprocess.run(command, capture_output=True, timeout=120).returncode:
            pytest.skip("npm is not here, or has no network for axe-core")
    return script.read_text()


def prepare(tab: Tab, model: FakeFrontend, place: str) -> None:
    """Has something of everything in sight."""
    if place == "chat":
        model.reply = REPLY
        say(tab, "hi")
        tab.wait(
            "document.querySelectorAll('#messages pre').length && document.getElementById('stop').hidden"
        )
        click(tab, "[aria-label=Regenerate]")
        tab.wait(f"{IDLE} && document.querySelectorAll('.versions:not([hidden])').length")
        tab.bring("drop", ("a.txt", "text/plain", b"a"), ("b.pdf", "application/pdf", b"%PDF"))
        tab.wait("document.getElementById('told').textContent.includes('b.pdf')")
        click(tab, '[aria-label="Edit this answer as a new branch"]')
        fill(tab, "search", "hi")
        tab.run("window.fetch = async () => { throw new TypeError(); }")
        tab.run("document.dispatchEvent(new Event('visibilitychange'))")
        tab.wait("!document.getElementById('state').hidden")
        click(tab, "#open-settings")
        tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    elif place == "live":
        tab.wait("document.querySelectorAll('#charts polyline').length >= 4")
    elif place != "first":
        click(tab, "#ask [type=submit]")
        tab.wait("document.querySelectorAll('#output .help').length")


@pytest.mark.slow(3)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("place", ["first", "chat", "decide", "compare", "rank", "live"])
def test_the_rules_of_axe_are_kept(tab: Tab, model: FakeFrontend, axe: str, place: str, theme: str) -> None:
    with opened(tab, model, place):
        tab.run(f"document.documentElement.dataset.theme = {theme!r}")
        prepare(tab, model, place)
        tab.run(f"(() => {{ {axe} }})()")
        tab.run("new Promise((done) => setTimeout(done, 200))")  # what appears by and by is there
        found = tab.run("""axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations
          .map(({id, nodes}) => [id, ...nodes.slice(0, 3).map((one) => one.html + one.failureSummary)]))""")
        assert found == []


@pytest.mark.parametrize("place", ["chat", "compare", "live"])
def test_a_screen_reader_has_a_name_for_everything(tab: Tab, model: FakeFrontend, place: str) -> None:
    with opened(tab, model, place):
        prepare(tab, model, place)
        fields = tab.fields()
        assert ("link", "New chat") in fields
        assert [role for role, name in fields if not name and role != "RootWebArea"] == []


def test_answers_are_said_once_when_they_are_complete(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        tab.run("""((place) => new MutationObserver(() => (window.heard ??= []).push(place.textContent))
          .observe(place, {childList: true, characterData: true}))(document.getElementById("said"))""")
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")
        assert tab.run("window.heard") == ["The model answers.", "Hello, world."]
        assert tab.run("document.querySelector('#messages').closest('[aria-live]')") is None


def test_the_tab_key_goes_through_the_page_in_its_order(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        tab.run("document.getElementById('skip').focus()")
        seen: list[str] = []
        while len(seen) < 40 and "input" not in seen:
            tab.press("Tab")
            seen.append(
                tab.run("document.activeElement.id || document.activeElement.innerText.split('\\n')[0]")
            )
        views = ["go-chat", "go-decide", "go-compare", "go-rank", "go-live"]
        assert seen[:8] == ["hide-side", *views, "search", "theme"]
        assert seen[8:] == ["API", "model", "open-settings", *seen[11:-1], "input"]
        assert len(seen) - 12 == 3  # the examples
        tab.run("document.getElementById('skip').focus()")
        tab.press("Enter")
        assert tab.run("document.activeElement.id") == "main"
