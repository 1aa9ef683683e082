"""The expressions by which byte-level BPE cuts a text before it merges, by llama.cpp's names for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT_4 = (
    _SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _GPT_4.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN_35 = (
    _SHORTENED
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORTENED}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORTENED}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Cutting:
    """The rules by which a text is cut before its pieces are merged to tokens."""

    expressions: tuple[str, ...]
    """Regular expressions, each of which cuts further what those before it have left whole."""
    whole_words: bool = False
    """Whether a piece that is a token itself is taken as it is, whatever the merges would make of it."""
    composed: bool = False
    """Whether characters are composed first (NFC)."""
    adds_bos: bool = False
    """Whether a text begins with BOS if the file does not say."""
    adds_ends: bool = False
    """Whether a text stands between BOS and EOS, as for encoders."""


def _named(*groups: tuple[str, Cutting]) -> Iterator[tuple[str, Cutting]]:
    for names, cutting in groups:
        yield from ((name, cutting) for name in names.split())


CUTTINGS: Mapping[str, Cutting] = dict(
    _named(
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            Cutting((_GPT_4,), whole_words=True, adds_bos=True),
        ),
        ("dbrx smaug-bpe glm4 chatglm-bpe", Cutting((_GPT_4,))),
        ("qwen2", Cutting((_QWEN_2,), composed=True)),
        ("qwen35", Cutting((_QWEN_35,), composed=True)),
        ("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open", Cutting((_QWEN_2,))),
        ("deepseek-v3 hunyuan-dense", Cutting(_DEEPSEEK_3)),
        ("gpt-4o kanana2", Cutting((_GPT_4O,))),
        ("tekken", Cutting((_TEKKEN,), whole_words=True, adds_bos=True)),
        (
            "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum modern-bert",
            Cutting((_GPT_2,)),
        ),
        ("jina-v1-en jina-v2-code roberta-bpe", Cutting((_GPT_2,), adds_ends=True)),
        (
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
            Cutting((r"\p{N}", _GPT_2)),
        ),
        ("deepseek-coder", Cutting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))),
        ("bloom", Cutting((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",))),
        (
            "falcon",
            Cutting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]")),
        ),
        (
            "default",
            Cutting((r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")),
        ),
    )
)
"""The ways by the name that `tokenizer.ggml.pre` has."""
