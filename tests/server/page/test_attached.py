"""Files of a message in a real browser: chosen, dropped and pasted, pictures and texts."""

from chromium import Tab
from fake_frontend import FakeFrontend
from media_files import noise, saved
from media_frontend import let_see
from page_driver import click, hear, opened, say

from server.reading.body_table import USUAL_BODY

WAITING = "[...document.querySelectorAll('#attached img')].map(one => one.alt).join('|')"
TOLD = "document.getElementById('told').textContent"


def test_pictures_are_chosen_dropped_pasted_and_removed(tab: Tab, model: FakeFrontend) -> None:
    let_see(model, max_media_mb=1, limit_mm_per_prompt={"image": 3})
    file = saved(noise(40, 28))
    with opened(tab, model):
        tab.run("document.getElementById('files').click = () => { document.body.dataset.asked = 'yes'; }")
        click(tab, "#add-files")
        assert tab.run("document.body.dataset.asked") == "yes"
        for way in ("choose", "drop", "paste"):
            tab.bring(way, (f"{way}.png", "image/png", file))
        tab.wait(f"{WAITING} === 'choose.png|drop.png|paste.png'")
        tab.wait("[...document.querySelectorAll('#attached img')].every(one => one.naturalWidth === 40)")
        tab.bring("drop", ("more.png", "image/png", file))
        tab.wait(f"{TOLD} === 'more.png is one too many: a conversation may have 3 pictures.'")
        click(tab, '[aria-label="Remove drop.png"]')
        assert tab.run(WAITING) == "choose.png|paste.png"
        assert tab.run("document.activeElement.id") == "input"
        tab.bring("drop", ("big.png", "image/png", bytes(3 << 18)), ("a.heic", "image/heic", b"hi"))
        told = tab.wait(f"{TOLD}.includes('a.heic') && {TOLD}")
        assert told.startswith("big.png is too large: pictures of a conversation may have 1 MiB together")
        assert "a.heic is none of the pictures that can be read: image/jpeg, image/png" in told
        assert tab.run(WAITING) == "choose.png|paste.png"
        assert tab.run("document.querySelector('.examples li:last-child b').textContent") == "Show a picture"


def test_a_model_of_texts_says_why_it_takes_no_pictures(tab: Tab, model: FakeFrontend) -> None:
    with opened(tab, model):
        assert tab.run("document.getElementById('add-files').title").startswith("Add text files or PDFs")
        for way in ("drop", "paste"):
            tab.bring(way, ("a.png", "image/png", saved(noise(40, 28))))
            tab.wait(f"{TOLD} === 'a.png is a picture, and org/tiny reads text only.'")
        say(tab, "hi")
        hear(tab, "hi|Hello, world.")
        assert tab.run("document.querySelectorAll('#messages img, #attached img').length") == 0


PDF = b"""1 0 obj <</Type/Page/Contents 2 0 R>> endobj
2 0 obj <</Length 16>> stream
BT (words) Tj ET
endstream endobj"""


def test_texts_are_attached_as_far_as_there_is_room(tab: Tab, model: FakeFrontend) -> None:
    waiting = "[...document.querySelectorAll('#attached .chip')].map(one => one.textContent).join('|')"
    with opened(tab, model):
        tab.bring("drop", ("b.pdf", "application/pdf", b"%PDF"), ("b.bin", "", b"\xff\0"))
        told = tab.wait(f"{TOLD}.includes('b.bin') && {TOLD}")
        assert told.startswith("b.pdf is broken: no pages are found in it.")
        assert told.endswith("b.bin is neither a picture nor a text in UTF-8.")
        tab.bring("drop", ("c.pdf", "application/pdf", PDF))
        assert tab.wait(f"{waiting}.includes('c.pdf') && {waiting}") == "c.pdf"
        assert tab.run("document.querySelector('#attached button').click()") is None
        long = "\u00e9 " * 2048
        tab.bring("drop", ("a.py", "", b"print(1)"), ("b.txt", "text/plain", long.encode()))
        assert tab.wait(f"{waiting}.includes('b.txt') && {waiting}") == "a.py|b.txt (the first 49 %)"
        assert "only the first 49 % of it are sent, 3,064 tokens" in tab.run(TOLD)
        say(tab, "What is it?")
        hear(tab, "What is it?|Hello, world.")
        asked = model.tokenizer.decode(model.asked[-1][0], False)
        assert "a.py:\n```\nprint(1)\n```\n\nb.txt (the first 49 %):\n```\n\u00e9 " in asked


def test_no_more_of_a_text_is_counted_than_a_body_may_have(tab: Tab, model: FakeFrontend) -> None:
    counts = """
      window.fetch = async (_, {body}) => (window.sent = body.length,
        new Response(JSON.stringify({tokens: [1, 2], max_model_len: 4096})));
    """
    with opened(tab, model):
        tab.run(counts)
        tab.bring("drop", ("big.txt", "text/plain", b"\n." * 2_500_000))
        assert "the first 40 %" in tab.wait("document.getElementById('attached').innerText")
        assert tab.run("window.sent") < USUAL_BODY


def test_a_file_that_is_dropped_beside_the_chat_replaces_no_page(tab: Tab, model: FakeFrontend) -> None:
    prevents = """(place) => {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File(["words"], "a.txt"));
      const drop = new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer });
      place.dispatchEvent(drop);
      return drop.defaultPrevented;
    }"""
    with opened(tab, model):
        assert tab.run(f"({prevents})(document.getElementById('side'))")
        field = "Object.assign(document.createElement('input'), {type: 'file'})"
        assert not tab.run(f"(field => (document.body.append(field), ({prevents})(field)))({field})")
