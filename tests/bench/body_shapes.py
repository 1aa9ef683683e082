"""Bodies for `bodies.py`: those that cost the most for their bytes, and large ones that are of use."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

MIB, KIB = 1 << 20, 1 << 10
MANY_TEXTS = 15 * MIB
"""Bytes of a body for an endpoint that takes many texts, a little less than it may have."""
OTHERS = 3900 * KIB

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TALK = '"max_tokens":1,"messages":[{"role":"user","content":"hi"}]'
HI = '"max_tokens":1,"prompt":"hi"'
MESSAGE = '{"role":"user","content":"hi"}'
TOOL = '{"type":"function","function":{"name":"f","parameters":{}}}'
DEEP_TOOL = TOOL.replace("{}", '{"a":' + "[" * 900 + "]" * 900 + "}")
SMALL_TEXTS = '{"encoding_format":"base64","input":['
MANY = {"prompt": ["a"] * 256, "max_tokens": 1}
RUNAWAY = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
HOARDER = "{% set ns = namespace(s='aa') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"


@dataclass(frozen=True)
class Shape:
    name: str
    path: str
    body: Callable[[int], bytes]
    """Makes the body. Takes the size that it shall have in bytes; some have one of their own."""

    @property
    def size(self) -> int:
        """The size of a body that is as long as it may be."""
        return OTHERS if self.path in (CHAT, TEXT, "/tokenize", "/detokenize", "/abort") else MANY_TEXTS


def repeated(name: str, path: str, before: str, each: str, after: str, own_size: int = 0) -> Shape:
    """A body that repeats `each`, with commas between."""

    def body(size: int) -> bytes:
        count = ((own_size or size) - len(before) - len(after)) // (len(each) + 1)
        return (before + ",".join([each] * count) + after).encode()

    return Shape(name, path, body)


def numbered(name: str, before: str, each: str, after: str) -> Shape:
    """A body whose entries have different numbers."""

    def body(size: int) -> bytes:
        count = size // (len(each) + 6)
        return (before + ",".join(each % i for i in range(count)) + after).encode()

    return Shape(name, TEXT, body)


def as_json(name: str, path: str, body: Callable[[int], object]) -> Shape:
    return Shape(name, path, lambda size: json.dumps(body(size)).encode())


def words(size: int) -> str:
    return ("The quick brown fox jumps over the lazy dog, and runs on. " * (size // 58 + 1))[:size]


def _talk(*sizes: int) -> dict[str, object]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": words(size)} for size in sizes]}


def _texts(count: int, size: int) -> dict[str, object]:
    return {"input": [words(size)] * count, "encoding_format": "base64"}


def _ids(count: int) -> list[int]:
    return list(range(100, 100 + count))


HOSTILE = [
    repeated("tools", CHAT, "{" + TALK + ',"tools":[', TOOL, "]}"),
    repeated("documents", CHAT, "{" + TALK + ',"documents":[', "{}", "]}"),
    repeated("messages", CHAT, '{"messages":[', MESSAGE, "]}"),
    repeated("parts of a message", CHAT, '{"messages":[{"role":"user","content":[', '"a"', "]}]}"),
    repeated("values for the template", CHAT, "{" + TALK + ',"chat_template_kwargs":{"a":[', "1", "]}}"),
    repeated("wrong messages", CHAT, '{"messages":[', "1", "]}"),
    repeated("prompts", TEXT, '{"prompt":[', '"a"', '],"max_tokens":1}'),
    repeated("prompts of ids", TEXT, '{"prompt":[', "[1]", '],"max_tokens":1}'),
    numbered("logit_bias", "{" + HI + ',"logit_bias":{', '"%d":1', "}}"),
    numbered("unknown fields", "{" + HI + ",", '"x%d":1', "}"),
    repeated("stop", TEXT, "{" + HI + ',"stop":[', '"a"', "]}"),
    repeated("wrong stop", TEXT, "{" + HI + ',"stop":[', "1", "]}"),
    repeated("metadata", TEXT, "{" + HI + ',"metadata":[', "1", "]}"),
    repeated("bad_words", TEXT, "{" + HI + ',"bad_words":[', '"a"', "]}"),
    as_json("one long text", TEXT, lambda size: {"prompt": words(size - 99), "max_tokens": 1}),
    Shape(
        "escapes", TEXT, lambda size: b'{"max_tokens":1,"prompt":"' + rb"\u00e4" * ((size - 99) // 6) + b'"}'
    ),
    Shape("an emoji", TEXT, lambda size: ('{"prompt":"' + words(size - 99) + '\U0001f600"}').encode()),
    Shape("open brackets", TEXT, lambda size: b"[" * size),
    Shape("an open text", TEXT, lambda size: b'{"prompt":"' + b"a" * (size - 99)),
    repeated("ids to detokenize", "/detokenize", '{"tokens":[', "1", "]}"),
    as_json("a text to tokenize", "/tokenize", lambda size: {"prompt": words(size - 99)}),
    repeated("request_ids", "/abort", '{"request_ids":[', '"a"', "]}"),
    repeated("texts to embed", EMBED, '{"input":[', '"a"', "]}"),
    repeated("texts of one id", EMBED, '{"input":[', "[1]", "]}"),
    repeated("one text of ids", EMBED, '{"input":[', "1", "]}"),
    repeated("wrong texts to embed", EMBED, '{"input":["a",', "1", "]}"),
    repeated("conversations to embed", EMBED, '{"messages":[', f"[{MESSAGE}]", "]}"),
    repeated("texts for cohere", "/v2/embed", '{"texts":[', '"a"', "]}"),
    repeated("documents to score", "/score", '{"text_1":"a","text_2":[', '"a"', "]}"),
    repeated("16,000 texts of one byte", EMBED, SMALL_TEXTS, '"a"', "]}", 60 * KIB),
    repeated("16,000 texts for tei", "/embed", '{"inputs":[', '"a"', "]}", 60 * KIB),
    repeated("16,000 texts for Cohere", "/v2/embed", '{"texts":[', '"a"', "]}", 60 * KIB),
    repeated("16,000 documents to score", "/score", '{"text_1":"a","text_2":[', '"a"', "]}", 60 * KIB),
    repeated("16,000 documents to rank", "/rerank", '{"query":"a","documents":[', '"a"', "]}", 60 * KIB),
    as_json("256 prompts of 5,000 ids", TEXT, lambda _: {**MANY, "prompt": [[1] * 5000] * 256}),
    as_json("256 long prompts", TEXT, lambda _: {**MANY, "prompt": [words(15 * KIB)] * 256}),
    repeated("4,000 messages", CHAT, '{"max_tokens":1,"messages":[', MESSAGE, "]}", 120 * KIB),
    Shape("depth in tools", CHAT, lambda size: ("{" + TALK + f',"tools":[{DEEP_TOOL}]' + "}").encode()),
    as_json("allowed ids of 256 prompts", TEXT, lambda _: {**MANY, "allowed_token_ids": _ids(8000)}),
    as_json("bad words of 256 prompts", TEXT, lambda _: {**MANY, "bad_words": [f"w{i}" for i in range(120)]}),
    as_json("a template that never ends", CHAT, lambda size: {**_talk(9), "chat_template": RUNAWAY}),
    as_json("a template that hoards", CHAT, lambda size: {**_talk(9), "chat_template": HOARDER}),
]

USUAL = [
    as_json("chat of 20 KiB", CHAT, lambda _: _talk(10 * KIB, 7 * KIB, 3 * KIB)),
    as_json("chat of 200 messages", CHAT, lambda _: _talk(*[80] * 200)),
    as_json("prompt of 15 KiB", TEXT, lambda size: {"prompt": words(15 * KIB), "max_tokens": 1}),
    as_json("prompt of 8,000 ids", TEXT, lambda _: {"prompt": _ids(8000), "max_tokens": 1}),
    as_json("256 prompts of 1,000 ids", TEXT, lambda _: {"prompt": [_ids(1000)] * 256, "max_tokens": 1}),
    as_json("256 prompts of 1 KiB", TEXT, lambda _: {"prompt": [words(KIB)] * 256, "max_tokens": 1}),
    as_json("16 texts of 300 bytes", EMBED, lambda _: _texts(16, 300)),
    as_json("256 texts of 300 bytes", EMBED, lambda _: _texts(256, 300)),
    as_json("2,048 texts of 300 bytes", EMBED, lambda _: _texts(2048, 300)),
    as_json(
        "2,048 texts of 500 ids", EMBED, lambda _: {"input": [_ids(500)] * 2048, "encoding_format": "base64"}
    ),
    as_json("16,000 texts of 900 bytes", EMBED, lambda _: _texts(16000, 900)),
    as_json("detokenize 8,000 ids", "/detokenize", lambda _: {"tokens": _ids(8000)}),
    as_json("tokenize 20 KiB", "/tokenize", lambda size: {"prompt": words(20 * KIB)}),
]
