"""The tokenizer of Marian's published checkpoints, as a tokenizer.json: no torch, no transformers.

A text is cut by the SentencePiece model of its language (source.spm), whose pieces have their ids in
vocab.json, which both languages share. Pieces of the other language alone are spelled with a mark that no
text has, so that no text is cut into them, and that is taken away when tokens become text.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from models.plain_files import FileError, read_object

MARK = "\U0010ffff"
"""What stands before pieces that are only written."""
SOURCE = "source.spm"
_NORMAL, _USER_DEFINED = 1, 4
_UNIGRAM = 1
_BLANK = "\u2581"
_END, _UNKNOWN, _PADDING = "</s>", "<unk>", "<pad>"
_Field = tuple[int, int | bytes]


def write_marian(folder: Path, path: Path) -> None:
    """Writes the tokenizer.json of a checkpoint. Raises FileError."""
    vocabulary: Mapping[str, object] = read_object(folder / "vocab.json")
    ids = {name: id for name, id in vocabulary.items() if isinstance(id, int)}
    if (folder / "target_vocab.json").exists():
        raise FileError(f"{folder}: Marian models of two vocabularies are not served")
    if missing := [name for name in (_END, _UNKNOWN) if name not in ids]:
        raise FileError(f"{folder / 'vocab.json'} has no {missing[0]}")
    try:
        scores, charsmap = _read_model((folder / SOURCE).read_bytes())
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise FileError(
            f"{folder / SOURCE} is not a SentencePiece model that can be read: {error}"
        ) from error
    path.write_text(json.dumps(_tokenizer(ids, scores, charsmap)), "utf-8")


def _tokenizer(ids: Mapping[str, int], scores: Mapping[str, float], charsmap: bytes) -> dict[str, object]:
    least = min(scores.values(), default=0.0)
    names = {id: name for name, id in ids.items()}
    spelled = [names.get(id, str(id)) for id in range(max(names) + 1)]
    plain = {name for name in ids if _is_code(name)} | {_END, _UNKNOWN, _PADDING} | scores.keys()
    vocab = [
        (name if id in names and name in plain else MARK + name, scores.get(name, least))
        for id, name in enumerate(spelled)
    ]
    blanks = {"type": "Metaspace", "replacement": _BLANK, "prepend_scheme": "always", "split": True}
    normalizers: list[dict[str, object]] = [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]
    if charsmap:
        text = base64.b64encode(charsmap).decode()
        normalizers.insert(0, {"type": "Precompiled", "precompiled_charsmap": text})
    end = {"SpecialToken": {"id": _END, "type_id": 0}}
    taken_away = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(ids),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": blanks,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"] + [end],
            "special_tokens": {_END: {"id": _END, "ids": [ids[_END]], "tokens": [_END]}},
        },
        "decoder": {"type": "Sequence", "decoders": [taken_away, blanks]},
        "model": {"type": "Unigram", "unk_id": ids[_UNKNOWN], "vocab": vocab, "byte_fallback": False},
    }


def _added_tokens(ids: Mapping[str, int]) -> list[dict[str, object]]:
    """Special tokens, and the codes of languages that stand at the beginning of a text."""
    return [
        {
            "id": id,
            "content": name,
            "special": not _is_code(name),
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for name, id in sorted(ids.items(), key=lambda item: item[1])
        if name in (_END, _UNKNOWN, _PADDING) or _is_code(name)
    ]


def _is_code(name: str) -> bool:
    return name.startswith(">>") and name.endswith("<<")


def _read_model(data: bytes) -> tuple[dict[str, float], bytes]:
    """The scores of the pieces of a SentencePiece model, and how it normalises characters."""
    scores, charsmap, kind = dict[str, float](), b"", _UNIGRAM
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        fields = dict(_fields(value))
        if number == 1:
            name, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
            if fields.get(3, _NORMAL) in (_NORMAL, _USER_DEFINED) and isinstance(name, bytes):
                [scores[name.decode()]] = struct.unpack("<f", score if isinstance(score, bytes) else b"")
        elif number == 2:
            kind = fields.get(3, _UNIGRAM)
        elif number == 3 and isinstance(found := fields.get(2), bytes):
            charsmap = found
    if kind != _UNIGRAM or not scores:
        raise FileError(f"{SOURCE} is no model of unigrams: name a tokenizer.json with --tokenizer")
    return scores, charsmap


def _fields(data: bytes) -> Iterator[_Field]:
    """The fields of a message of Protocol Buffers: whole numbers, or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
                yield tag >> 3, value
                continue
            case 1 | 5:
                length = 8 if tag & 7 == 1 else 4
            case 2:
                length, at = _varint(data, at)
            case kind:
                raise struct.error(f"a field of kind {kind}")
        if at + length > len(data):
            raise struct.error("it ends within a field")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
