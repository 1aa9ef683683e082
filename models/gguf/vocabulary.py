"""The vocabulary in a GGUF file's metadata: its tokens with their kinds and scores. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from models.gguf.file import GgufFile, Value
from models.plain_files import FileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The kinds of tokens, by their numbers in the file."""

_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"),
    *("<|end_of_text|>", "</s>"),
)
"""Control tokens that end an answer in any model that has them."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, as the fields below `tokenizer.ggml` say."""

    file: GgufFile
    model: str
    """The kind of tokenizer: gpt2, llama, bert or t5."""
    tokens: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]

    def get(self, name: str) -> Value | None:
        return self.file.metadata.get(f"tokenizer.ggml.{name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        return value if isinstance(value, bool) else default

    def special(self, *names: str) -> str | None:
        """The first special token of these names that the file has, as its text."""
        for name in names:
            id = self.get(f"{name}_token_id")
            if isinstance(id, int) and 0 <= id < len(self.tokens):
                return self.tokens[id]
        return None

    def ids(self) -> dict[str, int]:
        """The ids of all tokens, without those that only fill the rows of the embeddings up."""
        found: dict[str, int] = {}
        for id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind != UNUSED or not token.startswith("[PAD"):
                found.setdefault(token, id)
        return found

    def ends(self) -> list[int]:
        """The ids of all tokens that end an answer; the primary one comes first."""
        named = [self.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        found = [id for id in named if isinstance(id, int) and 0 <= id < len(self.tokens)]
        found += [
            id
            for id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind == CONTROL and token in _ENDS
        ]
        return list(dict.fromkeys(found))


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """Raises FileError if the file has no vocabulary, or a broken one."""
    model, tokens = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "tokens"))
    if not isinstance(model, str) or not isinstance(tokens, list) or not tokens:
        raise FileError(
            f"{file.path} has no vocabulary (tokenizer.ggml.model and tokens): name the model's tokenizer "
            "with --tokenizer"
        )
    count = len(tokens)
    kinds = _numbers(file, "token_type", count) or array("i", [NORMAL]) * count
    scores = _numbers(file, "scores", count) or array("f", [0.0]) * count
    return Vocabulary(file, model, tokens, cast("Sequence[int]", kinds), scores)


def _numbers(file: GgufFile, name: str, count: int) -> Sequence[float] | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if not isinstance(value, array) or len(value) != count:
        raise FileError(f"{file.path}: tokenizer.ggml.{name} must have a number for each of {count} tokens")
    return cast("Sequence[float]", value)


def chat_templates(metadata: Mapping[str, Value]) -> list[dict[str, str]]:
    """The chat templates by name, as tokenizer_config.json lists them."""
    found = {"default": metadata.get("tokenizer.chat_template")}
    named = metadata.get("tokenizer.chat_templates")
    for name in named if isinstance(named, list) else ():
        found[name] = metadata.get(f"tokenizer.chat_template.{name}")
    return [{"name": name, "template": text} for name, text in found.items() if isinstance(text, str)]
