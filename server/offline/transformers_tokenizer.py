"""The tokenizer of transformers, for programs that ask for it; the engine and the server have their own."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from server.options.server_config import ServerConfig
from server.requests.checkpoint_facts import tokenizer_folder
from server.text.tokenizer_files import template_text


def open_transformers_tokenizer(config: ServerConfig, folder: Path) -> Any:
    """Loads the checkpoint's tokenizer, or the one of the option `tokenizer`, by AutoTokenizer."""
    transformers = import_module("transformers")  # by name: it brings torch, which the server never imports
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tokenizer_folder(config, folder),
        trust_remote_code=config.engine.worker.trust_remote_code,
        local_files_only=True,
    )
    if config.chat_template is not None:
        tokenizer.chat_template = template_text(config.chat_template)
    return tokenizer
