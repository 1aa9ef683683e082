"""Tiny models that see pictures as a server needs them: with a tokenizer, and a chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pictured import write_pictured
from qwen_pictured import PICTURE, Pictured
from shape_files import read_shapes
from tiny import write_tokenizer
from tokenizers import Tokenizer
from torch import nn


def write_chat_files(folder: Path, tokens: Mapping[int, str], written: str, video: str = "") -> Tokenizer:
    """Writes a tokenizer in which these tokens are special, and a template in which a picture is `written`.

    All tokens from the first of them on are no text.
    """
    write_tokenizer(folder)
    path, first = folder / "tokenizer.json", min(tokens)
    saved: dict[str, Any] = json.loads(path.read_text())
    names = {id: name for name, id in saved["model"]["vocab"].items()}
    saved["model"]["merges"] = saved["model"]["merges"][: first - max(names) - 1]
    names |= {id: f"<unused{id}>" for id in names if id >= first} | dict(tokens)
    saved["model"]["vocab"] = {name: id for id, name in names.items()}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    saved["added_tokens"] += [{"id": id, "content": names[id], **special} for id in sorted(tokens)]
    path.write_text(json.dumps(saved))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{% if c.type == 'image' %}"
        + written
        + "{% elif c.type == 'video' %}"
        + video
        + "{% else %}{{ c.text }}{% endif %}"
        "{% endfor %}{% endif %} {% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return Tokenizer.from_file(str(path))


LLAVA, SETTINGS = (read_shapes("pictured")[name] for name in ("llava", "llava settings"))


def write_llava(folder: Path, **changes: Any) -> tuple[nn.Module, Tokenizer]:
    """Saves a random LLaVA whose pictures have four tokens."""
    model = write_pictured("LlavaForConditionalGeneration", folder, LLAVA | changes, SETTINGS)
    return model, write_chat_files(folder, {PICTURE: "<image>"}, "<image>")


QWEN = {PICTURE: "<|image_pad|>", 311: "<|video_pad|>", 312: "<|vision_start|>", 313: "<|vision_end|>"}
"""The special tokens of Qwen-VL, as tiny checkpoints number them."""


def write_qwen(architecture: str, folder: Path) -> tuple[Pictured, Tokenizer]:
    """Saves a random model of the Qwen-VL kind."""
    pictured = Pictured.write(architecture, folder)
    return pictured, write_chat_files(
        folder, QWEN, *("".join(QWEN[id] for id in (312, pad, 313)) for pad in (PICTURE, 311))
    )
