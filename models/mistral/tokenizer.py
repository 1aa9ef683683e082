"""tekken.json: byte-pair encoding by ranks, as the files of the `tokenizers` library write it. No torch."""

from __future__ import annotations

import base64
import binascii
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from models.plain_files import FileError, read_text_bytes

Json = dict[str, object]

_BOS, _EOS, _UNK = "<s>", "</s>", "<unk>"
_OLDEST = (
    *(_UNK, _BOS, _EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
    ),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The control tokens of files that do not list theirs, in the order of their ids."""

_CHAT = """{%- macro text(content) %}
{%- if content is string %}{{ content }}
{%- elif content %}
{%- for part in content %}
{%- if not loop.first and part.type == loop.previtem.type == "text" %}{{ "\\n\\n" }}{% endif %}
{{- {"audio": "[BEGIN_AUDIO][AUDIO]", "image": "[IMG]"}.get(part.type, part.text) }}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}{{ raise_exception("there is no chat template for tools: give one with --chat-template") }}
{%- endif %}
{%- set all = namespace(messages=[], asked=0) %}
{%- for message in messages %}
{%- set content = message.content %}
{%- set parts = [{"type": "text", "text": content}] if content is string else content or [] %}
{%- if message.role == "user" and all.messages and all.messages[-1].role == "user" %}
{%- set parts = all.messages[-1].content + parts %}
{%- set all.messages = all.messages[:-1] %}
{%- endif %}
{%- set all.messages = all.messages + [{"role": message.role, "content": parts}] %}
{%- if message.role == "user" %}{% set all.asked = all.messages | length %}{% endif %}
{%- endfor %}
{%- for message in all.messages %}
{%- set content = message.content %}
{%- if message.role == "system" %}SYSTEM
{%- elif message.role == "user" %}[INST]USER{{ text(content) }}[/INST]
{%- elif message.role == "assistant" %}{{ text(content).rstrip(" ") }}{{ eos_token }}
{%- else %}{{ raise_exception("roles are system, user and assistant; for others give --chat-template") }}
{%- endif %}
{%- endfor %}"""
"""How conversations are written from version 7 on and before, with what differs as SYSTEM and USER. Messages
of a user that follow one another are one, and answers end without spaces, as in mistral-common."""
_OWN_TOKENS = ("[SYSTEM_PROMPT]{{ text(content) }}[/SYSTEM_PROMPT]", "")
_IN_LAST_MESSAGE = (
    "",
    '{% if loop.index == all.asked and messages[0].role == "system" %}{{ text(messages[0].content) }}'
    '{{ "\\n\\n" }}{% endif %}',
)


class _Config(msgspec.Struct, frozen=True):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str = "v3"


class _Word(msgspec.Struct, frozen=True):
    token_bytes: str


class _Special(msgspec.Struct, frozen=True):
    rank: int
    token_str: str


class _Tekken(msgspec.Struct, frozen=True):
    config: _Config
    vocab: list[_Word]
    special_tokens: list[_Special] | None = None


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write what a tekken.json means into a folder. Its tokenizer.json is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(path)), "utf-8")
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        written = Path(aside) / "tokenizer.json"
        written.write_text(json.dumps(tokenizer_json(path), ensure_ascii=False), "utf-8")
        written.replace(folder / "tokenizer.json")


def tokenizer_json(path: Path) -> Json:
    """The tokenizer.json of a tekken.json: control tokens come first, then bytes and what is made of them."""
    read = _read(path)
    names = _special_names(read)
    try:
        words = [base64.b64decode(word.token_bytes, validate=True) for word in read.vocab]
    except binascii.Error as error:
        raise FileError(f"{path}: a token is not base64: {error}") from None
    words = words[: read.config.default_vocab_size - len(names)]
    letters = _letters()
    spelled = ["".join(letters[byte] for byte in word) for word in words]
    vocab = {name: id for id, name in enumerate([*names, *spelled])}
    if len(vocab) < len(names) + len(words) or not all(letter in vocab for letter in letters):
        raise FileError(f"{path}: 'vocab' has a token twice, or lacks one of the 256 bytes")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut = {
        "type": "Split",
        "pattern": {"Regex": read.config.pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    begin: list[Json] = [
        {"SpecialToken": {"id": _BOS, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return {
        "version": "1.0",
        "added_tokens": [_added(id, name) for id, name in enumerate(names)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": begin,
            "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {_BOS: {"id": _BOS, "ids": [names.index(_BOS)], "tokens": [_BOS]}},
        },
        "decoder": {**level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": _merges(spelled), "ignore_merges": True},
    }


def tokenizer_config(path: Path) -> Json:
    """The tokenizer_config.json beside it, with a chat template for texts."""
    version = _read(path).config.version.removeprefix("v")
    system, user = _OWN_TOKENS if version.isdecimal() and int(version) >= 7 else _IN_LAST_MESSAGE
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS,
        "eos_token": _EOS,
        "unk_token": _UNK,
        "chat_template": _CHAT.replace("SYSTEM\n", f"{system}\n").replace("USER", user),
    }


def _read(path: Path) -> _Tekken:
    try:
        return msgspec.json.decode(read_text_bytes(path), type=_Tekken)
    except msgspec.MsgspecError as error:
        raise FileError(f"{path} is not a tekken.json: {error}") from None


def _special_names(read: _Tekken) -> list[str]:
    """The control tokens in the order of their ids, of which those that nobody names are made up."""
    count = read.config.default_num_special_tokens
    named: Mapping[int, str] = dict(enumerate(_OLDEST))
    if read.special_tokens:
        named = {each.rank: each.token_str for each in read.special_tokens}
    names = [named.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]
    if _BOS not in names or _EOS not in names:
        raise FileError(f"tekken.json: {_BOS} and {_EOS} are not among the {count} control tokens")
    return names


def _letters() -> list[str]:
    """The character that stands for each byte: itself if it can be seen, else one of those behind U+0100."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def _merges(spelled: Sequence[str]) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third one, in the order of the third's rank."""
    rank = {word: index for index, word in enumerate(spelled)}
    merges: list[tuple[str, str]] = []
    for word in spelled:
        cuts = [(word[:at], word[at:]) for at in range(1, len(word))]
        merges += sorted(
            (cut for cut in cuts if cut[0] in rank and cut[1] in rank),
            key=lambda cut: (rank[cut[0]], rank[cut[1]]),
        )
    return merges


def _added(id: int, name: str) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": name, **flags, "special": True}
