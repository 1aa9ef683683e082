"""A tiny LLaVA that can be served: a checkpoint with a tokenizer and a chat template, and its own answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pictured import TEXT, VISION, write_pictured
from tiny import VOCAB_SIZE, write_tokenizer
from tokenizers import AddedToken, Tokenizer
from torch import nn

IMAGE = VOCAB_SIZE
"""The id of the token that stands for a picture."""
SETTINGS: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}"
)


def write_llava(folder: Path) -> nn.Module:
    """Saves a random model whose pictures have four tokens, and returns it."""
    fields = {
        "text_config": {**TEXT, "vocab_size": VOCAB_SIZE + 1, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "image_token_index": IMAGE,
    }
    model = write_pictured("LlavaForConditionalGeneration", folder, fields, SETTINGS)
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return model
