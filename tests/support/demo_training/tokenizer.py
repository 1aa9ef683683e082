"""The demo model's tokenizer and chat template: made, saved and used here, without transformers."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from demo_training.corpus import Document, Json, Message
from models.checkpoint.hub import DEMO

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK, THOUGHT_END = "<think>", "</think>"
# These are single tokens, but part of the text, since whoever reads calls and reasoning must see them.
MARKS = ("<tool_call>", "</tool_call>", THINK, THOUGHT_END)
VOCAB_SIZE = 2048
MAX_LEN = 2048

_TEMPLATE = DEMO / "chat_template.jinja"


def train(documents: Iterable[Document]) -> Tokenizer:
    """Train a byte-level BPE, so that any text survives the round trip."""
    tokenizer = Tokenizer(BPE())
    # Each digit is a token, so that a sum is a matter of columns, not of memorised numbers.
    tokenizer.pre_tokenizer = Sequence([Split(Regex(r"\d"), "isolated"), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKS),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_words_of, documents), trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return tokenizer


def _words_of(document: Document) -> str:
    """The pieces of text that BPE is to split, without the marks, which are tokens already."""
    text = (
        render_chat(document.messages, document.tools, answer_next=False)
        if document.messages
        else document.text
    )
    for mark in (TURN_START, TURN_END, *MARKS):
        text = text.replace(mark, "\n")
    return text


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files with which a server turns messages into ids: tokenizer, its facts and template."""
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / _TEMPLATE.name).write_text(_TEMPLATE.read_text())


def render_chat(
    messages: list[Message], tools: list[Json], answer_next: bool, *, thinks: bool = False
) -> str:
    """`thinks`: the answer that comes next begins with reasoning."""
    return _template().render(
        messages=messages, tools=tools, add_generation_prompt=answer_next, enable_thinking=thinks
    )


@cache
def _template() -> Template:
    # The environment is set up as in transformers: a template must give the same text in every server.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(_TEMPLATE.read_text())


class Codec:
    """An encoder of texts and conversations to ids, and of ids back to text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def encode_chat(
        self, messages: list[Message], tools: list[Json], answer_next: bool, *, thinks: bool = False
    ) -> list[int]:
        return self.encode(render_chat(messages, tools, answer_next, thinks=thinks))

    def id_of(self, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise KeyError(f"{token!r} is no token of the demo model")
        return number
