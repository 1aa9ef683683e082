"""The reader of PDF files, run by node over files that the tests write."""

import base64
import io
import json
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image

from server.page.routes import FOLDER

NODE = shutil.which("node")
pytestmark = [pytest.mark.skipif(NODE is None, reason="no node here"), pytest.mark.slow(2)]

PROGRAM = """
import { createInterface } from "node:readline";
import { textOfPdf } from %s;
for await (const line of createInterface({ input: process.stdin })) {
  const [data, most] = JSON.parse(line), bytes = new Uint8Array(Buffer.from(data, "base64"));
  console.log(JSON.stringify(await textOfPdf(bytes, most).catch(({ message }) => message)));
}
"""
Read = Callable[..., Any]
"""Takes a file and the most characters that are wanted; returns what `textOfPdf` returns, or its error."""
PLAIN = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
MAPPED = "<</Type/Font/Subtype/Type0/Encoding/Identity-H/ToUnicode 9 0 R>>"
BOMB = "unpacks to more than 64 MiB, which this page does not read: attach its text."
UNMAPPED = "<</Type/Font/Subtype/Type0/Encoding/Identity-H>>"
CMAP = b"""1 begincodespacerange <0000> <ffff> endcodespacerange
1 beginbfchar <0001> <00660069> endbfchar
2 beginbfrange <0010> <0012> <03b1> <0020> <0021> [<0078> <d83dde00>] endbfrange"""


def lzw(data: bytes) -> bytes:
    """Packs as PDF and TIFF do, by Pillow, which writes such pictures."""
    made = io.BytesIO()
    Image.frombytes("L", (len(data), 1), data).save(made, "TIFF", compression="tiff_lzw")
    start, length = (Image.open(made).getexif()[tag] for tag in (273, 279))
    return made.getvalue()[start : start + length]


FILTERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "/FlateDecode": zlib.compress,
    "[/ASCII85Decode/LZWDecode]": lambda data: base64.a85encode(lzw(data), wrapcol=72) + b"~>",
    "/ASCIIHexDecode": lambda data: data.hex().encode() + b">",
}


def stream(data: bytes, packs: bool, more: str = "", filter: str = "") -> bytes:
    filter = filter or ("/FlateDecode" if packs else "")
    data = FILTERS[filter](data)
    kind = f"/Filter{filter}" if filter else ""
    return f"<<{more}{kind}/Length {len(data)}>>\nstream\n".encode() + data + b"\nendstream"


def pdf(
    *contents: bytes,
    font: str = PLAIN,
    packs: bool = False,
    ids: tuple[int, ...] = (20, 21),
    named: bytes = b"null",
) -> bytes:
    """A PDF whose pages, in their order, have the object numbers `ids`, and may show what is `named` X."""
    kids = " ".join(f"{i} 0 R" for i in ids)
    objects = {
        1: b"<</Type/Catalog/Pages 2 0 R>>",
        2: f"<</Type/Pages/Resources<</Font<</F {font}>>/XObject<</X 8 0 R>>>>/Kids[{kids}]>>".encode(),
        8: named,
        9: stream(CMAP, packs),
    }
    for i, content in zip(ids, contents, strict=False):
        objects[i] = f"<</Type/Page/Parent 2 0 R/Contents {i + 10} 0 R>>".encode()
        objects[i + 10] = stream(content, packs)
    if packs:  # all that are no streams stand in one
        inner = {i: text for i, text in objects.items() if b"stream" not in text}
        starts, body = [], b""
        for i, text in inner.items():
            starts.append(f"{i} {len(body)}")
            body += text + b"\n"
        head = (" ".join(starts) + "\n").encode()
        objects = {i: text for i, text in objects.items() if i not in inner}
        more = f"/Type/ObjStm/N {len(inner)}/First {len(head)}"
        objects[50] = stream(head + body, packs, more)
    parts = [f"{i} 0 obj\n".encode() + text + b"\nendobj\n" for i, text in sorted(objects.items())]
    return b"%PDF-1.5\n" + b"".join(parts) + b"trailer\n<</Root 1 0 R>>\n%%EOF"


@pytest.fixture(scope="module")
def read() -> Iterator[Read]:
    program = PROGRAM % json.dumps((FOLDER / "chat/pdf.js").as_uri())
    command = [str(NODE), "--no-warnings", "--input-type=module", "-e", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdin is not None and node.stdout is not None
        asked, answers = node.stdin, node.stdout

        def read(content: bytes, most: int = 1 << 20) -> Any:
            asked.write(json.dumps([base64.b64encode(content).decode(), most]) + "\n")
            asked.flush()
            return json.loads(answers.readline())

        yield read
        asked.close()


LINES = rb"""BT /F 10 Tf 14 TL 50 700 Td
(One \(1\) \351) Tj 0 -14 Td [(t)3(wo)-300(words)] TJ T* <7468726565> Tj
(four) ' 30 0 Td (on) Tj 1 0 0 1 50 600 Tm 0 0 (f\013) " ET"""


@pytest.mark.parametrize("packs", [False, True])
def test_texts_come_by_lines_and_pages_in_their_order(read: Read, packs: bool) -> None:
    made = pdf(LINES, b"BT /F 10 Tf (second) Tj ET", packs=packs, ids=(21, 20))
    assert read(made) == {"text": "One (1) \u00e9\ntwo words\nthree\nfour on\nfff\n\nsecond", "share": 1}


def test_without_a_tree_pages_come_in_the_order_of_objects(read: Read) -> None:
    made = pdf(b"BT (b) Tj ET", b"BT (a) Tj ET", ids=(21, 20)).replace(b"/Root", b"/Boot")
    assert read(made) == {"text": "a\n\nb", "share": 1}


@pytest.mark.parametrize("packs", [False, True])
def test_codes_mean_what_the_font_maps_them_to(read: Read, packs: bool) -> None:
    made = pdf(b"BT /F 9 Tf <0001001000120020 0021> Tj ET", font=MAPPED, packs=packs, ids=(20,))
    assert read(made) == {"text": "fi\u03b1\u03b3x\U0001f600", "share": 1}


@pytest.mark.parametrize("filter", FILTERS)
def test_forms_are_read_where_they_are_shown_however_they_are_packed(read: Read, filter: str) -> None:
    shown = b"BT /F 8 Tf (in " + b"x" * 3000 + b") Tj ET /X Do"
    form = stream(shown, False, "/Subtype/Form", filter)
    made = pdf(b"BT /F 9 Tf (one) Tj ET /X Do BT 0 -20 Td (two) Tj ET", ids=(20,), named=form)
    text = read(made)["text"]
    assert set(text.split("\n")) == {"one", "in " + "x" * 3000, "two"}


def test_reading_ends_when_there_is_enough(read: Read) -> None:
    made = pdf(*[b"BT (four) Tj ET"] * 4, ids=(20, 21, 22, 23))
    assert read(made, 5) == {"text": "four\n\nfour", "share": 0.5}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (pdf(LINES).replace(b"/Root", b"/Encrypt 5 0 R/Root"), "is encrypted: save it without a password."),
        (pdf(b"/X Do", ids=(20,), named=b"<</Subtype/Image>>"), "holds pictures of pages, no text."),
        (pdf(b"BI /W 1 ID x EI", ids=(20,)), "holds pictures of pages, no text."),
        (pdf(b"0 0 m 9 9 l S /X Do", ids=(20,)), "holds no text that this page can read."),
        (pdf(b"/X Do", ids=(20,), named=stream(b"/X Do " * 3, False, "/Subtype/Form")), BOMB),
        (
            pdf(b"BT /F 9 Tf <00010010> Tj ET", font=UNMAPPED, ids=(20,)),
            "has fonts that do not say which letters they show.",
        ),
        (b"%PDF-1.5\n" + bytes(range(256)) * 40, "is broken: no pages are found in it."),
        (
            b"1 0 obj <</Type/ObjStm/First 99/Length 3>>stream\nabc\nendstream",
            "is broken: no pages are found in it.",
        ),
        (b"1 0 obj <<[(<( 1 0 R stream 2 0 obj /ObjStm", "is broken: no pages are found in it."),
    ],
    ids=["encrypted", "picture", "inline", "lines", "laughs", "unmapped", "garbage", "short", "cut"],
)
def test_what_cannot_be_read_is_said(read: Read, content: bytes, told: str) -> None:
    assert read(content) == told


def test_a_stream_that_unpacks_to_too_much_is_said(read: Read) -> None:
    assert read(pdf(bytes(65 << 20), packs=True, ids=(20,))) == BOMB
