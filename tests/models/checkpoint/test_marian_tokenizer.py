"""The tokenizer of Marian's checkpoints: the pieces of SentencePiece, under the ids of both languages."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model

from models.checkpoint.marian_tokenizer import write_marian
from models.plain_files import FileError
from server.text.detokenizer import byte_decoding
from server.text.tokenizer_files import TokenizerFiles

BLANK = "\u2581"
PIECES = {
    BLANK: -2.0, f"{BLANK}the": -1.0, f"{BLANK}t": -4.0, "he": -3.0, "h": -5.0, "e": -5.0, "t": -5.0,
    "et": -2.5, f"{BLANK}eth": -6.0, "n": -4.5, "then": -8.0, f"{BLANK}h": -3.5,
}  # fmt: skip
WRITTEN = ["der", f"{BLANK}das", "x", f"{BLANK}he"]
"""Pieces of the other language alone."""
IDS = {name: id for id, name in enumerate(["</s>", "<unk>", *WRITTEN, ">>de<<", *PIECES, "<pad>"])}


def field(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([number << 3, value])
    assert len(value) < 16384
    return bytes([number << 3 | 2, len(value) & 127 | 128, len(value) >> 7]) + value


def model_file(kind: int = 1) -> bytes:
    special = [field(1, field(1, name) + field(3, of)) for name, of in ((b"<unk>", 2), (b"</s>", 3))]
    pieces = [field(1, field(1, name.encode()) + field(2, score)) for name, score in PIECES.items()]
    return b"".join([*special, *pieces, field(2, field(3, kind)), field(3, field(3, 1))])


def write(folder: Path, **changes: bytes) -> None:
    (folder / "source.spm").write_bytes(model_file())
    (folder / "vocab.json").write_text(json.dumps(IDS))
    for name, data in changes.items():
        (folder / name.replace("_", ".")).write_bytes(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("marian")
    write(folder)
    write_marian(folder, folder / "tokenizer.json")
    return Model.from_file(str(folder / "tokenizer.json"))


def cut(text: str) -> list[int]:
    """The ids of a text by the definition: of all ways to cut it, that with the greatest sum of scores."""
    rest = BLANK + BLANK.join(text.split()) if text.split() else ""
    unknown = min(PIECES.values()) - 10
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(rest) + 1):
        ways = list[tuple[float, list[str]]]()
        for start in range(end):
            piece = rest[start:end]
            score = PIECES.get(piece, unknown if end - start == 1 else None)
            if score is not None:
                ways.append((best[start][0] + score, [*best[start][1], piece]))
        best.append(max(ways, key=lambda way: way[0]))
    ids = list[int]()
    for piece in best[-1][1]:
        id = IDS[piece] if piece in PIECES else IDS["<unk>"]
        if not (ids and id == ids[-1] == IDS["<unk>"]):  # neighbours that are unknown are one
            ids.append(id)
    return [*ids, IDS["</s>"]]


@given(st.text("then xder", max_size=24))
@settings(max_examples=150)
def test_texts_are_cut_as_sentencepiece_cuts_them(made: Model, text: str) -> None:
    assert made.encode(text).ids == cut(text)


def test_a_code_of_a_language_is_a_token_of_its_own(made: Model) -> None:
    assert made.encode(">>de<< then").ids == [IDS[">>de<<"], *cut("then")]
    assert made.encode("the</s>the").ids == [*cut("the")[:-1], IDS["</s>"], *cut("the")]


def test_pieces_of_the_other_language_are_written_and_never_read(made: Model) -> None:
    tokens = [IDS[name] for name in (f"{BLANK}das", "der", f"{BLANK}the", "x")]
    assert made.decode(tokens) == "dasder thex"
    assert set(made.encode("das der x he").ids).isdisjoint(IDS[name] for name in WRITTEN)
    decoding = byte_decoding(json.loads(made.decoder.__getstate__()))
    assert decoding is not None
    spelled = [decoding.token_bytes(made.id_to_token(id) or "") for id in tokens]
    assert b"".join(spelled) == b" dasder thex" and decoding.strip == -1


def test_a_server_makes_it_once_of_the_files_that_are_published(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "source_lang": "en"}')
    tokenizer = TokenizerFiles(str(folder), str(tmp_path / "cache")).load()
    assert tokenizer.encode("then the") == cut("then the")
    assert tokenizer.eos_id == IDS["</s>"] and tokenizer.token_text(IDS["der"]) == "der"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"source_spm": model_file(kind=2)}, "no model of unigrams"),
        ({"source_spm": model_file()[:-3]}, "not a SentencePiece model"),
        ({"source_spm": b"\xff" * 9}, "not a SentencePiece model"),
        ({"source_spm": b""}, "no model of unigrams"),
        ({"vocab_json": b'{"a": 1}'}, "has no </s>"),
        ({"target_vocab.json": b"{}"}, "two vocabularies"),
    ],
)
def test_what_cannot_be_read_is_said(changes: dict[str, bytes], told: str, tmp_path: Path) -> None:
    write(tmp_path)
    for name, data in changes.items():
        (tmp_path / name.replace("_spm", ".spm").replace("vocab_json", "vocab.json")).write_bytes(data)
    with pytest.raises(FileError, match=told):
        write_marian(tmp_path, tmp_path / "tokenizer.json")


TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  Zwei   Leerzeichen\tund Tabs \n", "caf\u00e9 \uff21\uff22 \ufb01n",
    "\u4f60\u597d \U0001f98a mixed", "", " ", "a", "1,234.5 \u00a0 x\u00b2",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Recommended")
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    from transformers import MarianTokenizer

    lines = [
        f"{word} number {at} of the lazy brown foxes, caf\u00e9 {at * 7}"
        for at in range(400)
        for word in ("one", "two")
    ]
    for name in ("source", "target"):
        text = tmp_path / f"{name}.txt"
        text.write_text("\n".join(line if name == "source" else line[::-1] for line in lines))
        given = {"input": str(text), "model_prefix": str(tmp_path / name), "vocab_size": 90, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(**given, normalization_rule_name="nmt_nfkc")
        (tmp_path / f"{name}.model").rename(tmp_path / f"{name}.spm")
    pieces = [
        model.id_to_piece(id)
        for name in ("source", "target")
        for model in [sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / f"{name}.spm"))]
        for id in range(3, model.get_piece_size())
    ]
    names = dict.fromkeys(["</s>", "<unk>", *pieces, ">>fr<<", "<pad>"])
    (tmp_path / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(names)}))
    theirs = MarianTokenizer.from_pretrained(tmp_path)
    write_marian(tmp_path, tmp_path / "tokenizer.json")
    ours = Model.from_file(str(tmp_path / "tokenizer.json"))
    for text in (*TEXTS, *lines[:40], ">>fr<< the dog"):
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids).strip() == theirs.decode(ids, skip_special_tokens=True)
