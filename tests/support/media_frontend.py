"""A scripted frontend whose model takes pictures as Qwen2-VL does, prepared by real processes."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fake_frontend import VOCAB_SIZE, FakeFrontend, byte_tokenizer
from media_files import QWEN_CONFIG, QWEN_SETTINGS, media_files, noise, saved
from model_facts import changed

from server.media.media_reader import MediaReader
from server.options.media_options import MediaOptions

PAD = VOCAB_SIZE
NAMES = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)
FILES = media_files("Qwen2VLForConditionalGeneration", {**QWEN_CONFIG, "image_token_id": PAD}, QWEN_SETTINGS)


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


PICTURE = saved(noise(56, 56))
"""A picture of four tokens, whose file has more bytes than are left in a body."""
SMALL = saved(noise(56, 28).resize((40, 20)).convert("1"))
"""One whose file is small."""


WIDTH = 1024
"""The numbers of an embedding."""


def let_see(frontend: FakeFrontend, **options: Any) -> MediaReader:
    """Lets a frontend take pictures; one that prepares is closed. `options` are those of media."""
    frontend.tokenizer = byte_tokenizer(*NAMES, template=TEMPLATE)
    given = FILES, MediaOptions(**options), 1 << 30, frontend.tokenizer, frontend.metrics.of_media()
    reader = frontend.media = MediaReader(*given, frontend.helpers, width=WIDTH)
    ready = changed(frontend.facts.ready, vocab_size=VOCAB_SIZE + len(NAMES))
    frontend.facts = msgspec.structs.replace(frontend.facts, ready=ready, media=reader.facts)
    return reader


@asynccontextmanager
async def seeing(frontend: FakeFrontend, **options: Any) -> AsyncIterator[MediaReader]:
    """Lets a frontend take pictures, prepared in the loop that runs. `options` are those of media."""
    reader = let_see(frontend, **options)
    try:
        yield reader
    finally:
        frontend.helpers.close()
