"""Pictures at a real server with a tiny LLaVA: answers are those of transformers, and none harms another."""

import base64
import io
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gemma_pictured
import numpy as np
import openai
import paligemma_pictured
import pytest
from chromium import PROGRAM, Tab, browser
from live import LiveServer, serving, wait_until
from media_files import noise, saved
from page_driver import kept_messages
from pictured import Prompts, expected, write_pictured
from pictured_chat import SETTINGS, write_chat_files, write_llava, write_qwen
from PIL import Image
from qwen_pictured import inputs
from tokenizers import Tokenizer
from transformers import CLIPImageProcessorPil

from server.run.commands import run
from server.terminal.server_client import ServerClient, ServerError

pytestmark = pytest.mark.turns(3)

SIZES = ("--dtype", "float32", "--num-gpu-blocks-override", "200", "--max-num-seqs", "8", "--block-size", "4")


def media_helpers(server: LiveServer) -> list[int]:
    """The processes that prepare media."""
    helpers = server._running(b"server.helpers.helper_process")  # pyright: ignore[reportPrivateUsage]
    return [pid for pid in helpers if Path(f"/proc/{pid}/comm").read_text() == "facet: media\n"]


def encoded(tokenizer: Tokenizer, *pieces: str | Image.Image) -> list[list[int] | Image.Image]:
    """The pieces of a prompt, texts as token ids."""
    return [
        tokenizer.encode(piece, add_special_tokens=False).ids if isinstance(piece, str) else piece
        for piece in pieces
    ]


class Llava:
    """The checkpoint, the server over it, and transformers' model."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = write_llava(folder)
        self.folder = folder
        (folder / "allowed").mkdir()
        (folder / "allowed" / "link.png").symlink_to("/etc/passwd")
        (folder / "allowed" / "a.png").write_bytes(saved(noise(40, 28)))

    def answer(self, *pieces: str | Image.Image, count: int = 8) -> list[int]:
        prompt = Prompts(self.folder).make(*encoded(self.tokenizer, *pieces))
        return expected(self.model, prompt, count, self._inputs).tokens

    def _inputs(self, pictures: list[Image.Image], ids: list[int]) -> dict[str, Any]:
        processor = CLIPImageProcessorPil(**SETTINGS)
        return {"pixel_values": processor(pictures, return_tensors="pt")["pixel_values"]}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Llava:
    return Llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def server(llava: Llava) -> Iterator[LiveServer]:
    allowed = ("--allowed-local-media-path", str(llava.folder / "allowed"), "--media-seconds", "3")
    details = ("--enable-prompt-tokens-details", "--max-media-mb", "48")
    with serving(str(llava.folder), *SIZES, *allowed, *details) as server:
        yield server


def url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def part(file: bytes | str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(file) if isinstance(file, bytes) else file}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def asked(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    return {**body, "return_token_ids": True}


def tokens(server: LiveServer, *content: dict[str, Any], **fields: Any) -> list[int]:
    response = server.post("/v1/chat/completions", asked(*content, **fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


ONE, TWO = noise(40, 28), noise(31, 90)


def test_answers_are_those_of_transformers(llava: Llava, server: LiveServer) -> None:
    right = llava.answer("user: see ", ONE, " and ", TWO, " ")
    content = [text("see "), part(saved(ONE)), text(" and "), part(saved(TWO))]
    for _ in range(2):
        assert tokens(server, *content) == right
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        stream = client.chat.completions.create(  # pyright: ignore[reportCallIssue]
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": content}],  # pyright: ignore[reportArgumentType]
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        *_, last = stream
    assert last.usage is not None and last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.model_extra == {"multimodal_tokens": 8}
    assert last.usage.prompt_tokens_details.cached_tokens
    assert tokens(server, part(f"file://{llava.folder}/allowed/a.png")) == llava.answer("user: ", ONE, " ")


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
    ],
)
def test_pictures_of_any_shape_in_steps_that_cut_them(architecture: str, tmp_path: Path) -> None:
    pictured, tokenizer = write_qwen(architecture, tmp_path)
    wide, square = noise(170, 40), noise(100, 96)
    begin, end = "<|vision_start|>", "<|vision_end|>"
    pieces = (f"user: see {begin}", wide, f"{end} and {begin}", square, f"{end} ok ")
    prompt = pictured.prompts.make(*encoded(tokenizer, *pieces))
    right = expected(pictured.model, prompt, 8, lambda *given: inputs(pictured.settings, *given)).tokens
    content = [text("see "), part(saved(wide)), text(" and "), part(saved(square)), text(" ok")]
    with serving(str(tmp_path), *SIZES, "--block-size", "16", "--max-num-batched-tokens", "24") as server:
        assert tokens(server, *content) == tokens(server, *content) == right


@pytest.mark.turns(6)
def test_pictures_in_lines_of_their_own_whose_tokens_see_each_other(tmp_path: Path) -> None:
    model = write_pictured(
        "Gemma3ForConditionalGeneration", tmp_path, gemma_pictured.FIELDS, gemma_pictured.SETTINGS
    )
    names = {310: "<image_soft_token>", 311: "<start_of_image>", 312: "<end_of_image>"}
    tokenizer = write_chat_files(tmp_path, names, "<start_of_image>")
    pieces = encoded(tokenizer, "user: see \n\n", ONE, "\n\n and \n\n", TWO, "\n\n ok ")
    right = expected(model, Prompts(tmp_path).make(*pieces), 8, gemma_pictured.inputs).tokens
    content = [text("see "), part(saved(ONE)), text(" and "), part(saved(TWO)), text(" ok")]
    with serving(str(tmp_path), *SIZES, "--max-num-batched-tokens", "24") as server:
        assert tokens(server, *content) == tokens(server, *content) == right


@pytest.mark.turns(3)
def test_a_prompt_without_a_template_that_sees_itself_both_ways(tmp_path: Path) -> None:
    """It is written as by transformers' processor: pictures, a mark, the text and a line's end."""
    model, tokenizer = paligemma_pictured.write_with_tokenizer(tmp_path)
    prompt = Prompts(tmp_path).make(*encoded(tokenizer, ONE, TWO, "<bos>what is it\n"))
    right = paligemma_pictured.answer(model, prompt, 8).tokens
    content = [part(saved(ONE)), text("what is it"), part(saved(TWO))]
    with serving(str(tmp_path), *SIZES) as server:
        assert tokens(server, *content) == tokens(server, *content) == right
        body = asked(*content)
        body["messages"] += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        refused = server.post("/v1/chat/completions", body)
        assert refused.status_code == 400 and "has not learned conversations" in refused.text


def test_pictures_of_one_size_are_told_apart(llava: Llava, server: LiveServer) -> None:
    for seed in range(3):
        picture = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (28, 28, 3), dtype=np.uint8))
        assert tokens(server, part(saved(picture)), text("what")) == llava.answer("user: ", picture, "what ")


def test_choices_share_a_picture(llava: Llava, server: LiveServer) -> None:
    body = asked(part(saved(ONE)), n=4, temperature=1, seed=1)
    assert len(server.post("/v1/chat/completions", body).json()["choices"]) == 4


class _Site(BaseHTTPRequestHandler):
    """A site that redirects, or sends a body that never ends."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"x" * (1 << 16 if "endless" in self.path else 1))
                if "slow" in self.path:
                    time.sleep(0.2)
        except OSError:
            pass

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


BOMB = (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    + chunk(b"IDAT", zlib.compress(bytes(10_000)))
    + chunk(b"IEND", b"")
)


def animation(frames: int) -> bytes:
    file = io.BytesIO()
    pictures = [Image.new("L", (2, 2), n % 256) for n in range(frames)]
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:])
    return file.getvalue()


HOSTILE: dict[str, tuple[Any, int, str]] = {
    "loopback": ("http://127.0.0.1:1/", 400, "no public address"),
    "cloud": ("http://169.254.169.254/latest/meta-data", 400, "no public address"),
    "file": ("file:///etc/passwd", 400, "lies outside of the folder"),
    "link": ("file://ALLOWED/link.png", 400, "lies outside of the folder"),
    "bomb": (BOMB, 400, "60000 x 60000"),
    "strip": (saved(Image.new("RGB", (1, 100_000))), 400, "200"),
    "cut": (saved(noise(300, 300))[:5000], 400, "ends too early"),
    "none": (b"not a picture", 400, "A picture must be one of"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_item_that_is_refused_harms_no_other(llava: Llava, server: LiveServer, name: str) -> None:
    file, status, message = HOSTILE[name]
    if isinstance(file, str):
        file = file.replace("ALLOWED", f"{llava.folder}/allowed")
    response = server.post("/v1/chat/completions", asked(part(file)))
    assert (response.status_code, message in response.text) == (status, True), response.text
    assert tokens(server, part(saved(ONE))) == llava.answer("user: ", ONE, " ")


@pytest.mark.slow
def test_bodies_that_do_not_end(llava: Llava, site: str) -> None:
    flags = ("--allowed-media-domains", "localhost", "--max-media-mb", "1", "--media-seconds", "2")
    with serving(str(llava.folder), *SIZES, *flags) as server:
        endless = server.post("/v1/chat/completions", asked(part(f"{site}/endless")))
        assert endless.status_code == 422 and "more than the 1048576 bytes" in endless.text
        slow = server.post("/v1/chat/completions", asked(part(f"{site}/slow")))
        assert slow.status_code == 422 and "not fetched within 2 s" in slow.text
        many = server.post("/v1/chat/completions", asked(*[part(saved(ONE))] * 17))
        assert many.status_code == 400 and "At most 16 image(s)" in many.text
        assert tokens(server, text("hi")) and not media_helpers(server)


def test_what_is_odd_is_read(llava: Llava, server: LiveServer) -> None:
    black = Image.new("RGB", (2, 2))
    assert tokens(server, part(animation(2000))) == llava.answer("user: ", black, " ")
    jpeg = "data:video/mp4;base64," + base64.b64encode(saved(ONE)).decode()
    assert tokens(server, part(jpeg)) == llava.answer("user: ", ONE, " ")
    quoted = tokens(server, text("an <image> is "), part(saved(ONE)))
    assert quoted == llava.answer("user: an <", "image> is ", ONE, " ")


def test_a_process_that_dies_is_replaced(llava: Llava, server: LiveServer) -> None:
    tokens(server, part(saved(TWO)))
    for pid in media_helpers(server):
        os.kill(pid, signal.SIGKILL)
    time.sleep(1)  # one that ends while it is asked takes its item along
    assert tokens(server, part(saved(noise(29, 28)))) == llava.answer("user: ", noise(29, 28), " ")


@pytest.mark.slow
def test_signs_of_life_come_while_large_pictures_are_read(server: LiveServer) -> None:
    large = saved(Image.effect_noise((5000, 4000), 50).convert("RGB"), "JPEG")
    waits: list[float] = []
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(server.post, "/v1/chat/completions", asked(part(large + bytes([n]))), 120)
            for n in range(8)
        ]
        while not all(job.done() for job in jobs):
            since = time.monotonic()
            assert server.get("/health").status_code == 200
            waits.append(time.monotonic() - since)
            time.sleep(0.05)
    assert [job.result().status_code for job in jobs] == [200] * 8
    assert sorted(waits)[len(waits) // 2] < 0.5


@pytest.mark.slow
def test_no_child_is_left(llava: Llava) -> None:
    with serving(str(llava.folder), *SIZES) as server:
        assert not media_helpers(server)
        tokens(server, part(saved(ONE)))
        children = server.children()
        assert media_helpers(server)
        server.terminate()
        wait_until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children), 10, lambda: "")


def answered(server: LiveServer, messages: list[dict[str, Any]], **fields: Any) -> str:
    response = server.post("/v1/chat/completions", asked(**{"messages": messages, **fields}))
    return response.json()["choices"][0]["message"]["content"]


def _complete(tab: Tab, count: int) -> bool:
    """Whether the page has kept so many messages, the last of them an answer of 8 tokens."""
    kept = kept_messages(tab)
    return len(kept) == count and kept[-1].get("pace", "").startswith("8 tokens")


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_the_page_sends_pictures_with_each_message_of_their_conversation(server: LiveServer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [part(saved(ONE)), part(saved(TWO)), text("see")]}
    ]
    with browser() as tab:
        tab.open(server.url)
        tab.wait("document.body?.dataset.ready")
        for name, value in (
            ("option-temperature", "0"),
            ("option-max_tokens", "8"),
            ("more", '{"ignore_eos": true}'),
        ):
            tab.run(f"document.getElementById('{name}').value = '{value}'")
        tab.bring("choose", ("a.png", "image/png", saved(ONE)))
        tab.bring("paste", ("b.png", "image/png", saved(TWO)))
        for count, said in enumerate(("see", "more")):
            tab.run(
                f"document.getElementById('input').value = '{said}'; document.getElementById('input').focus()"
            )
            tab.press("Enter")
            wait_until(lambda count=count: _complete(tab, 2 * count + 2), 60, tab.text)
            if count:
                messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": kept_messages(tab)[-1]["content"]})
            assert messages[-1]["content"] == answered(server, messages[:-1])
        assert tab.run("document.querySelectorAll('#messages .user img').length") == 2
        assert tab.run("document.querySelectorAll('#pictures img').length") == 0
        assert tab.complaints == []


def test_facet_chat_sends_pictures_of_files(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(saved(ONE))
    (tmp_path / "b.png").write_bytes(saved(TWO))
    images = ("--image", str(tmp_path / "a.png"), "--image", str(tmp_path / "b.png"))
    options = ("-q", "see", "--temperature", "0", "--max-tokens", "8")
    assert run("facet", ["chat", "--url", server.url, *images, *options]) == 0
    message = {"role": "user", "content": [part(saved(ONE)), part(saved(TWO)), text("see")]}
    assert capsys.readouterr().out == answered(server, [message], ignore_eos=False) + "\n"


def test_a_body_that_is_too_long_is_told_to_who_still_sends_it(server: LiveServer) -> None:
    with ServerClient(server.url) as client, pytest.raises(ServerError, match="The body may have at most"):
        client.post("/v1/chat/completions", asked(text("a" * (80 << 20))))
