"""Adds tokens to the vocabulary of a fake frontend."""

from __future__ import annotations

import tokenizers
from fake_frontend import TEMPLATE, FakeFrontend
from model_facts import changed

from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer


def with_tokens(frontend: FakeFrontend, *names: str) -> dict[str, int]:
    """Adds special tokens behind all others, and returns the ids of all added tokens by name."""
    model = tokenizers.Tokenizer.from_str(frontend.tokenizer._model.to_str())
    model.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
    chat = ChatTemplate({"default": TEMPLATE}, {"bos_token": "<bos>", "eos_token": "<eos>"})
    frontend.tokenizer = Tokenizer(model, chat)
    frontend.facts = changed(frontend.facts, vocab_size=frontend.tokenizer.vocab_size)
    return frontend.tokenizer.added_tokens
