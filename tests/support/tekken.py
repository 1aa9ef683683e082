"""A tiny tokenizer in Mistral's own format."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

WORDS = [b"he", b"ll", b"llo", b"hello", b" he", b" hello", b"\xc3\xa9", b"lo"]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


def write_tekken(
    path: Path, special: Sequence[str] = SPECIAL, words: Sequence[bytes] = WORDS, **config: object
) -> None:
    """Writes a tokenizer of all bytes and these words, with control tokens and one more that has no name."""
    vocab = [bytes([byte]) for byte in range(256)] + list(words)
    said = {
        "pattern": r" ?[a-z]+|[^a-z]",
        "default_vocab_size": len(special) + 1 + len(vocab),
        "default_num_special_tokens": len(special) + 1,
        "version": "v7",
        **config,
    }
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate([*vocab, b"beyond the vocabulary"])
    ]
    control = [{"rank": id, "token_str": name, "is_control": True} for id, name in enumerate(special)]
    path.write_text(json.dumps({"config": said, "vocab": entries, "special_tokens": control}))
